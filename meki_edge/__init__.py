"""meki-edge: language models with token-indexed memory, from training to a Snapdragon phone."""
