# make demo     a two-node demo on this machine, in a minute: needs Python 3.10 or newer, no torch
# make test     what CI runs: format, lint, types, tests.  Installs torch: for its small CPU build, where there is one,
#               PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test
# make scenarios   what users do, and must see then, by commands and services alone, on a directory, on S3 and over SFTP; `make test` runs each on one of them, and the main ones on all
# make exhaustive   the trainings of three guides, small campaigns, each scenario on each kind of store, and the searches of which `make test` takes a sample, whole: a hook and a store whose every call fails, hostile pickles, servers that lie
# make campaign kill processes of a small cluster at any moment, a hundred times and more if asked: CAMPAIGN="--rounds 20 --seed 7"
# make campaign-trainers   train for real on two nodes, with the hook and without: DDP, FSDP2, ZeRO-2, ZeRO-3; each step of each training must be in the
#               store and equal to what the framework gathered (as root on Linux each node has a network of its own): a quarter of an hour a
#               round.  TRAINERS="--rounds 10", TRAINERS="--hooks hook --pause 0.8 --steps 12 --kill 3 --store s3", TRAINERS="--pause 1 --store s3 --cut 60", and --store sftp
# make campaign-resume     lose a training on two nodes with all its disks, pull it onto two fresh ones, and go on as if nothing had happened: FSDP2 and ZeRO-3,
#               five minutes.  RESUME="--modes zero3 --store sftp --ranks 2"
# make campaign-killed     kill trainers in the middle of a save, sixty times, let them be or go on over the same directory: whatever the store calls whole is
#               byte for byte one save that was finished, half an hour.  KILLED="--modes raw-zero2 raw-zero3 raw-accelerate raw-dcp --chains 2", KILLED="--store s3 --seed 7"
# make campaign-titan      torchtitan's saves, synchronous and not, with rotation, its ranks killed and begun again: every save that was whole is in the store, some minutes;
#               torch alone, as torchtitan uses it, unless TITAN="--python PYTHON" has torchtitan
# make campaign-ray-train  Ray Train on two nodes that share nothing, as it is, killed, and ended with an error, beside the same without us: RAY_TRAIN="--modes ddp fsdp2" (installs Ray)
# make campaign-llamafactory   LLaMA-Factory as it was released, in one process, under torchrun, on two nodes and under Ray, with the hook in every way it can get there: each step in the
#               store, each file as without us: half an hour, LLAMAFACTORY="--ways torchrun --hooks autoload" (installs LLaMA-Factory and Ray, 2 GB with a CPU build of torch, as above)
# make campaign-ray        merge over S3 on two Ray nodes, one of which is killed in the middle: RAY="--rounds 10" (installs Ray)
# make campaign-doctor     plant some eighty faults on one of two nodes, each found by `ckptsync doctor` and nothing else alarmed, and see that it leaves thirty
#               sound pairs in peace: three minutes, as root: DOCTOR="--only torch clock-5s", DOCTOR=--list
# make campaign-hostile    floods of files, ten inotify watches, a spool elsewhere, full disks, a clock that jumps: HOSTILE="--only clock"
# make kill-stores   kill writers to a directory, S3 and SFTP at every system call with which they change something, and at 200 moments: two
#               hours (strace, sshd are needed): KILL="--stores s3 --calls 50 --moments 50 --seed 7"
# make kill-heads   kill heads at every system call with which they change something, and at 200 moments, two of other options at work at once: half an
#               hour (strace is needed for the first): HEADS="--calls 10 --moments 40 --seed 7", HEADS="--store s3"
# make kill-gc      kill `ckptsync gc` and the head's retention at every system call with which they change something, and at any moment, half an hour
#               (strace is needed for the first): GC="--stores s3 --scenes remove --calls 20 --moments 40 --seed 7"
# make kill-pull    kill `ckptsync pull` at every system call with which it changes something, from a directory and from S3, a quarter of an hour (strace is
#               needed): PULL="--stores posix --calls 40 --seed 7"
# make crash-states   cut the power at every moment of a store's work, in a simulation (strace is needed): CRASH="--states 5000 --random 100"
# make damage   damage every vector in every way, and see that nothing goes unseen: DAMAGE="--flips 400 --only zero3"
# make fuzz     try inputs that nobody would write at every door (merges, pickles, records, heartbeats, configuration, command lines, spool, servers) for a minute, and
#               keep what is wrong in tests/fuzz_findings: FUZZ="--seconds 600 --door records --seed 7", FUZZ="--replay tests/fuzz_findings/records/*"
# make flips   ten thousand single bits turned over in a store, a thousand pages zeroed, files cut, swapped, stale, missing, extra, and ten thousand clean
#               looks: `ckptsync verify` has to find all of it and make nothing up: FLIPS="--flips 1000 --store s3"
# make bench-verify   verification beside `cat` (cold) and `sha256sum` (warm): VERIFY="--gib 1 --rounds 9"
# make models   level model with real models of transformers (installs it)
# make guides   run docs/guides/ with the trainers of `make bench`, with Lightning and with Ray; `make test` runs those that need no more than transformers and accelerate
# make nspawn   the units under real systemd, in a container of this system's own files that is gone afterwards (root and systemd-nspawn are needed)
# make lint     format, lint, types       make format   put the format right
# make bench    every figure in the documents, in an environment of its own: torch, accelerate, DeepSpeed; half an hour and 60 GB at most.
#               GIB=0.1 ROUNDS=2 make bench    for a look
# make bench-transfer   uploads, downloads and merges over S3 and SFTP beside s5cmd, rclone, boto3, s3fs, sftp, rsync, into docs/benchmarks-transfer.md:
#               an hour, and 20 GB in WORK=/dev/shm.  ONE=0.25 MANY=4 SMALL=200 SFTP=0.1 MERGE=0.1 ROUNDS=1 make bench-transfer    for a look
# make bench-beside   of that, what a training feels of a worker that sends at its cap: ten minutes, BESIDE="--cap 100 --pairs 12"
# make bench-idle   what a worker costs that has nothing to do, with 20 and with 100 checkpoints, and how soon it sends: ten minutes; IDLE="--seconds 60"
# make bench-hook   of that, what the hook takes of a step, with 10 to 1000 files: a minute; HOOK="--saves 20"
# make bench-catalogue   `ckptsync ls` of ten thousand checkpoints on a path and on SeaweedFS, cold and warm, into docs/benchmarks-catalogue.md: half an hour,
#               BENCH_CATALOGUE="--checkpoints 1000 --stores s3" for a look
# make bench-head   the memory of a head over ten thousand checkpoints while it merges and verifies a large one: ten minutes, BENCH_HEAD="--gib 1 --checkpoints 1000"
# make clean    forget the environment
#
# PYTHON=python3.12 make test    takes another Python, VENV=... another place for the environment, TESTS=tests/base/test_walk.py fewer tests.

PYTHON ?= python3
VENV ?= .venv
TESTS ?= tests
JOBS ?= 4
DEMO ?=
GIB ?= 2
ROUNDS ?= 5
COLD ?= 3
TENSORS ?= 100000
MEMORY_GIB ?= 1
PLAN_COUNTS ?= 10000 100000
BENCH_VENV ?= .venv-bench
TRANSFER_VENV ?= .venv-transfer
LLAMAFACTORY_VENV ?= .venv-llamafactory
LLAMAFACTORY ?=
ONE ?= 4
MANY ?= 64
SMALL ?= 2000
SFTP ?= 1
MERGE ?= 2
WORK ?= /dev/shm
TOOLS ?=
CAMPAIGN ?=
DAMAGE ?=
CRASH ?=
KILL ?=
HEADS ?=
GC ?=
PULL ?=
TRAINERS ?=
HOSTILE ?=
DOCTOR ?=
RESUME ?=
KILLED ?=
RAY ?=
RAY_TRAIN ?=
BESIDE ?=
BENCH_CATALOGUE ?=
BENCH_HEAD ?=
FLIPS ?=
VERIFY ?=
IDLE ?=

BIN := $(VENV)/bin
# Tests start programs a thousand times: Python compiles the package once, also where the environment forbids it to keep what it compiled.
# Neighbours in a file run in one process, which shares their fixtures and servers; whoever is done first takes tests from the others.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n $(JOBS) --dist worksteal
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test scenarios exhaustive lint format flips guides models bench bench-verify bench-transfer bench-beside bench-catalogue bench-head bench-idle bench-hook campaign campaign-trainers campaign-resume campaign-killed campaign-titan campaign-ray campaign-ray-train campaign-llamafactory campaign-hostile campaign-doctor damage fuzz crash-states kill-stores kill-heads kill-gc kill-pull nspawn clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(BIN)/ckptsync demo $(DEMO)

test: lint
	$(PYTEST) $(TESTS)

scenarios: $(VENV)/.installed-test
	CKPTSYNC_TEST_ALL=1 $(PYTEST) tests/scenarios

exhaustive: $(VENV)/.installed-test
	CKPTSYNC_TEST_ALL=1 $(PYTEST) $$(grep -rlE 'tests.support.exhaustive|hypothesis' tests --include='test_*.py' --exclude-dir=scenarios) tests/scenarios

lint: $(VENV)/.installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/mypy

format: $(VENV)/.installed-test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(BENCH_VENV)/.installed bench-beside bench-idle bench-hook
	$(BENCH_VENV)/bin/python -m benchmarks.merge --gib $(GIB) --rounds $(ROUNDS) --cold $(COLD) --tensors $(TENSORS)
	$(BENCH_VENV)/bin/python -m benchmarks.memory --gib $(MEMORY_GIB)
	$(BENCH_VENV)/bin/python -m benchmarks.plan --counts $(PLAN_COUNTS) > build/bench/plan.txt
	$(BENCH_VENV)/bin/python -m benchmarks.report build/bench/merge.json build/bench/memory.json --plan build/bench/plan.txt --beside build/bench/beside.json --idle build/bench/idle.json --hook build/bench/hook.json > docs/benchmarks.md.new
	mv docs/benchmarks.md.new docs/benchmarks.md

bench-transfer: $(TRANSFER_VENV)/.installed $(BENCH_VENV)/.installed
	$(TRANSFER_VENV)/bin/python -m benchmarks.transfer --one $(ONE) --many $(MANY) --small $(SMALL) --sftp $(SFTP) --merge $(MERGE) --generator $(BENCH_VENV)/bin/python --rounds $(ROUNDS) --work $(WORK) --tools '$(TOOLS)'
	$(TRANSFER_VENV)/bin/python -m benchmarks.transfer_report build/bench/transfer.json > docs/benchmarks-transfer.md.new
	mv docs/benchmarks-transfer.md.new docs/benchmarks-transfer.md

campaign: $(VENV)/.installed-test
	$(BIN)/python -m tests.campaigns.kill $(CAMPAIGN)

campaign-trainers: $(VENV)/.installed-test $(BENCH_VENV)/.installed
	$(BIN)/python -m tests.campaigns.trainers --python $(BENCH_VENV)/bin/python $(TRAINERS)

campaign-resume: $(VENV)/.installed-test $(BENCH_VENV)/.installed
	$(BIN)/python -m tests.campaigns.resume --python $(BENCH_VENV)/bin/python $(RESUME)

campaign-killed: $(VENV)/.installed-test $(BENCH_VENV)/.installed
	$(BIN)/python -m tests.campaigns.killed --python $(BENCH_VENV)/bin/python $(KILLED)

campaign-titan: $(VENV)/.installed-test $(BENCH_VENV)/.installed
	$(BIN)/python -m tests.campaigns.titan --python $(BENCH_VENV)/bin/python $(TITAN)

campaign-llamafactory: $(LLAMAFACTORY_VENV)/.installed
	$(LLAMAFACTORY_VENV)/bin/python -m tests.campaigns.llamafactory $(LLAMAFACTORY)

campaign-ray: $(VENV)/.installed-ray
	$(BIN)/python -m tests.campaigns.ray_nodes $(RAY)

campaign-ray-train: $(VENV)/.installed-test $(BENCH_VENV)/.installed-ray
	$(BIN)/python -m tests.campaigns.ray_train --python $(BENCH_VENV)/bin/python $(RAY_TRAIN)

campaign-doctor: $(VENV)/.installed-test
	$(BIN)/python -m tests.campaigns.doctor $(DOCTOR)

campaign-hostile: $(VENV)/.installed-test
	$(BIN)/python -m tests.campaigns.hostile $(HOSTILE)

bench-beside: $(VENV)/.installed-test $(BENCH_VENV)/.installed
	$(BIN)/python -m benchmarks.beside --python $(BENCH_VENV)/bin/python $(BESIDE)

bench-catalogue: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.catalogue --document docs/benchmarks-catalogue.md $(BENCH_CATALOGUE)

bench-idle: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.idle --out build/bench/idle.json $(IDLE)

bench-hook: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.hook --out build/bench/hook.json $(HOOK)

bench-head: $(VENV)/.installed-test
	mkdir -p build/bench
	$(BIN)/python -m benchmarks.head --json build/bench/head.json $(BENCH_HEAD)
	cat build/bench/head.json

damage: $(VENV)/.installed-test
	$(BIN)/python -m tests.campaigns.damage $(DAMAGE)

fuzz: $(VENV)/.installed-test
	$(BIN)/python -m tests.campaigns.fuzz $(FUZZ)

flips: $(VENV)/.installed-test
	$(BIN)/python -m tests.campaigns.flips $(FLIPS)

bench-verify: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.verify $(VERIFY)

models: $(VENV)/.installed-test
	$(PIP) --editable '.[model]'
	$(BIN)/python -m pytest tests/verify/test_model.py

guides: $(VENV)/.installed-test $(BENCH_VENV)/.installed-lightning $(BENCH_VENV)/.installed-ray
	CKPTSYNC_TEST_TRAINERS=$(abspath $(BENCH_VENV))/bin/python $(BIN)/python -m pytest -rs tests/test_guides.py

kill-stores: $(VENV)/.installed-test
	$(BIN)/python -m tests.campaigns.stores_kill $(KILL)

kill-heads: $(VENV)/.installed-test
	$(BIN)/python -m tests.campaigns.head_kill $(HEADS)

kill-gc: $(VENV)/.installed-test
	$(BIN)/python -m tests.campaigns.gc_kill $(GC)

kill-pull: $(VENV)/.installed-test
	$(BIN)/python -m tests.campaigns.pull_kill $(PULL)

crash-states: $(VENV)/.installed-test
	$(BIN)/python -m tests.campaigns.crash_states $(CRASH)

nspawn: $(VENV)/.installed-test
	CKPTSYNC_TEST_NSPAWN=1 $(BIN)/python -m pytest -rs tests/nspawn

clean:
	rm -rf $(VENV) $(BENCH_VENV) $(TRANSFER_VENV) $(LLAMAFACTORY_VENV) build/bench

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and f"{sys.executable} is Python {sys.version.split()[0]}, 3.10 or newer is needed: PYTHON=python3.12 make ...")'
	$(PYTHON) -m venv $(VENV)

# Installed in place, so that a change of the code needs no second installation; a change of these files does.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(PIP) --editable .
	@touch $@

$(VENV)/.installed-test: pyproject.toml tests/requirements.txt tests/support/get_sshd.sh | $(BIN)/python
	$(PIP) --requirement tests/requirements.txt --editable '.[test,load,zstd]'
	@tests/support/get_sshd.sh $(VENV)
	@touch $@ $(VENV)/.installed

# Ray is large, and one campaign's alone.
$(VENV)/.installed-ray: $(VENV)/.installed-test
	$(PIP) --editable '.[ray]'
	@touch $@

$(BENCH_VENV)/.installed: pyproject.toml benchmarks/requirements.txt
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check setuptools wheel $$(grep ^torch benchmarks/requirements.txt)
	$(BENCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --requirement benchmarks/requirements.txt --editable .
	@touch $@

$(BENCH_VENV)/.installed-lightning: $(BENCH_VENV)/.installed
	$(BENCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check 'lightning==2.6.*'
	@touch $@

$(BENCH_VENV)/.installed-ray: $(BENCH_VENV)/.installed
	$(BENCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check 'ray[default,train]==2.60.*'
	@touch $@

# torchaudio, which LLaMA-Factory imports before it knows whether there is sound, is on PyPI for torch with CUDA alone: beside another torch an empty one takes its place.
$(LLAMAFACTORY_VENV)/.installed: pyproject.toml tests/campaigns/llamafactory.txt
	$(PYTHON) -m venv $(LLAMAFACTORY_VENV)
	$(LLAMAFACTORY_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --requirement tests/campaigns/llamafactory.txt --editable .
	$(LLAMAFACTORY_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llamafactory==0.9.5
	$(LLAMAFACTORY_VENV)/bin/python -c 'import torchaudio' 2> /dev/null || touch "$$($(LLAMAFACTORY_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torchaudio.py"
	$(LLAMAFACTORY_VENV)/bin/ckptsync hook install
	@touch $@

# rclone, sftp and rsync are the system's: what is missing is left out, and said to be.
$(TRANSFER_VENV)/.installed: pyproject.toml benchmarks/requirements-transfer.txt
	$(PYTHON) -m venv $(TRANSFER_VENV)
	$(TRANSFER_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --requirement benchmarks/requirements-transfer.txt --editable '.[s3]'
	@touch $@
