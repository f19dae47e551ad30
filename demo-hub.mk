# make demo-hub: AI Hub's whole flow with the official client, against a server on this machine that
# speaks its protocol (tests/hub/server.py). Two small models, trained for a moment, are enough to send.

HUB := build/demo-hub
HUB_TRAIN := --preset demo --seed 0 --steps 20 --batch-size 4 --window-length 128 --warmup-steps 5 \
  --validate-every 20 --validation-windows 8
HUB_EXPORT := --context-length 256 --prefill-tokens 64 --verify-tokens 80

demo-hub: setup ## AI Hub's flow against a loopback server (about a minute on 2 quiet cores, set-up aside)
	test -d $(HUB)/text || $(BIN)/python benchmarks/corpora.py shakespeare $(HUB)/text
	$(MEKI) tokenize $(HUB)/text -o $(HUB)/tokens --vocab-size 4096 --validation-fraction 0.1
	$(MEKI) train $(HUB)/tokens -o $(HUB)/train/dense $(HUB_TRAIN)
	$(MEKI) train $(HUB)/tokens -o $(HUB)/train/meki $(HUB_TRAIN) --memory meki
	$(MEKI) reparam $(HUB)/train/meki $(HUB)/tokens -o $(HUB)/rom/meki --table-precision int8
	$(MEKI) export $(HUB)/train/dense $(HUB)/tokens -o $(HUB)/export/dense $(HUB_EXPORT)
	$(MEKI) export $(HUB)/rom/meki $(HUB)/tokens -o $(HUB)/export/meki $(HUB_EXPORT)
	$(MEKI) pack $(HUB)/export/dense $(HUB)/train/dense -o $(HUB)/bundle/dense
	$(MEKI) pack $(HUB)/export/meki $(HUB)/rom/meki -o $(HUB)/bundle/meki
	rm -rf $(HUB)/service
	$(BIN)/python tests/hub/demo.py $(HUB)/service $(HUB)/bundle/dense $(HUB)/bundle/meki -- \
	  $(HUB)/tokens $(HUB)/export/meki $(HUB)/rom/meki
