# make demo         a two-node demo on this machine, in a minute; needs Python 3.10 or newer, no torch
# make test         format, lint, types, import rules and tests. It installs torch; for the small CPU
#                   build: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test
# make scenarios    what users do and see, on a directory, on S3 and over SFTP
#                   (`make test` runs most scenarios on one of them only)
# make exhaustive   the searches of which `make test` takes a sample, complete: every failing call of
#                   a hook and a store, hostile pickles, lying servers; and the guides that train
# make s3-versions  the S3 store with the oldest and the newest botocore that pyproject.toml allows
# make test-web     the page in Chromium (Debian: apt-get install chromium)
# make pictures     the demo as a recording, and the page from a store that services fill, in docs/pictures
# make lint         format, lint, import rules, types, of the page too where tsc is installed
# make format       format the code
# make docs         the documents as a site, in build/site: open build/site/index.html
# make man          the man page of all commands, in build/ckptsync.1
# make release      wheel, sdist and a single-file zipapp in build/release, each installed and tried
#                   as users do: pip, uv, pipx
# make clean        delete the environments
#
# PYTHON=python3.12 takes another Python, VENV=... another place for the environment,
# TESTS=tests/base/test_walk.py fewer tests.
#
# Campaigns kill real processes, and damage what they read. Each takes options in a variable, for example
# KILL="--only pull --seed 7"; `--help` of the module that the target starts lists them.
#
# make campaign-trainers      train on two nodes, with and without the hook: DDP, FSDP2, ZeRO-2, ZeRO-3;
#                             each saved step must be in the store as in a training that nobody disturbs
#                             (15 minutes a round; as root each node has its own network)
#                             TRAINERS="--hooks hook --steps 12 --kill 3 --store s3"
# make campaign-in-front      `ckptsync resume` before a training on two nodes, killed again and again, with
#                             its disks: the losses are those of one that was never interrupted (10 minutes)
#                             IN_FRONT="--modes zero3 --store s3 --seed 7"
# make campaign-llamafactory  as campaign-trainers, with LLaMA-Factory as it was released (10 minutes,
#                             installs 2 GB) LLAMAFACTORY="--hooks embedded"
# make campaign-trl           as campaign-trainers, with TRL's SFT, DPO, GRPO, adapters with names, the best
#                             model at the end, copies for the Hub (15 minutes, installs 2 GB)
#                             TRL="--modes named hub --hooks none"
# make campaign-names         `merge --names-of` and `--fill-from` against save_pretrained, for about 55
#                             architectures of transformers (8 minutes) NAMES="--classes MixtralForCausalLM"
# make campaign-doctor        plant about 40 faults: `ckptsync doctor` must find each, and raise no alarm
#                             for 30 sound pairs of nodes (as root) DOCTOR="--only torch clock-5s"
# make kill                   kill push, pull and merge at every system call that changes something
#                             (strace), and at random moments (1 hour)
#                             KILL="--only push --stores s3 --calls 50 --moments 50"
# make crash-states           simulate a power cut at every moment of a store's work
#                             CRASH="--states 5000 --random 100"
# make damage                 damage every vector in every way: nothing may pass unseen
#                             DAMAGE="--flips 400 --only zero3"
# make fuzz                   hostile input to everything that reads, for a minute; findings are kept in
#                             tests/fuzz_findings FUZZ="--seconds 600 --door records --seed 7"
# make guides                 run docs/guides/ with the real trainers, Lightning and Ray
# make nspawn                 the services under real systemd in a container (root, systemd-nspawn)
# make slurm                  the batch script of docs/slurm.md under a real Slurm (root, Debian: slurm-wlm)
#
# Benchmarks write the tables in docs/benchmarks*.md.
#
# make bench            merges beside other tools (30 minutes, 60 GB at most; GIB=0.1 ROUNDS=2 for a look;
#                       LLAMAFACTORY=/path/to/llamafactory-cli compares its export, too)
# make bench-transfer   uploads and downloads beside s5cmd, rclone, boto3, s3fs, sftp, rsync (1 hour,
#                       20 GB in WORK=/dev/shm; ONE=0.25 MANY=4 SMALL=200 MIX=64 SFTP=0.1 MERGE=0.1 ROUNDS=1)
# make bench-killed     what transfers send again after a kill, beside rclone, s5cmd, aws (15 minutes)
#                       KILLED_TRANSFERS="--mib 64 --rounds 1"
# make bench-beside     what a training notices of a worker that uploads at its limit (10 minutes)
# make bench-idle       what an idle worker costs, and how soon it uploads (10 minutes)
# make bench-hook       what the hook adds to a training step (1 minute)
# make bench-catalogue  `ckptsync ls` and a head of many checkpoints (15 minutes)
#                       BENCH_CATALOGUE="--checkpoints 10000 --runs 5 --stores s3"
# make bench-head       memory of a head over 10,000 checkpoints during a merge (10 minutes)
# make bench-verify     verification beside `cat`, `sha256sum` and `model_signing` (if that is installed)

PYTHON ?= python3
VENV ?= .venv
TESTS ?= tests
JOBS ?= 4
DEMO ?=
GIB ?= 2
ROUNDS ?= 5
COLD ?= 3
LLAMAFACTORY ?=
TENSORS ?= 100000
MEMORY_GIB ?= 1
PLAN_COUNTS ?= 10000 100000
BENCH_VENV ?= .venv-bench
TRANSFER_VENV ?= .venv-transfer
DOCS_VENV ?= .venv-docs
LLAMAFACTORY_VENV ?= .venv-llamafactory
TRL_VENV ?= .venv-trl
RELEASE_VENV ?= .venv-release
LLAMAFACTORY ?=
TRL ?=
ONE ?= 4
MANY ?= 64
SMALL ?= 2000
MIX ?= 256
SFTP ?= 1
MERGE ?= 2
WORK ?= /dev/shm
TOOLS ?=
DAMAGE ?=
CRASH ?=
KILL ?=
TRAINERS ?=
DOCTOR ?=
BESIDE ?=
BENCH_CATALOGUE ?=
BENCH_HEAD ?=
VERIFY ?=
KILLED_TRANSFERS ?=
IDLE ?=

BIN := $(VENV)/bin
# Tests start programs a thousand times, so Python must keep what it compiled.
# Tests of one file run in one process and share its servers; an idle process steals tests.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m tests.support.run_again -n $(JOBS) --dist worksteal --durations 10
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test test-web pictures scenarios exhaustive s3-versions lint man docs format guides bench bench-verify bench-transfer bench-killed bench-beside bench-catalogue bench-head bench-idle bench-hook campaign-trainers campaign-in-front campaign-llamafactory campaign-trl campaign-names campaign-doctor damage fuzz crash-states kill nspawn slurm release clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(BIN)/ckptsync demo $(DEMO)

# Lint needs one core, so it runs beside the tests; its output comes last.
test: $(VENV)/.installed-test
	@mkdir -p build
	@make --no-print-directory lint > build/lint.log 2>&1 & lint=$$!; \
	$(PYTEST) $(TESTS); tests=$$?; \
	wait $$lint; linted=$$?; cat build/lint.log; \
	test $$tests = 0 && test $$linted = 0

scenarios: $(VENV)/.installed-test
	CKPTSYNC_TEST_ALL=1 $(PYTEST) tests/scenarios

exhaustive: $(VENV)/.installed-test
	CKPTSYNC_TEST_ALL=1 $(PYTEST) $$(grep -rlE 'tests.support.exhaustive|hypothesis' tests --include='test_*.py' --exclude-dir=scenarios) tests/scenarios

s3-versions: $(VENV)/.installed-test
	tested=; for version in ==1.36.0 '>=1.36,<1.45'; do \
		rm -rf build/botocore; \
		$(PIP) --target build/botocore "botocore$$version" || { echo "botocore$$version: left out, it cannot be installed here"; continue; }; \
		PYTHONPATH=build/botocore $(BIN)/python -c 'import botocore; print("botocore", botocore.__version__)'; \
		PYTHONPATH=build/botocore $(PYTEST) tests/stores/s3 || exit 1; \
		tested=1; \
	done; \
	test "$$tested" || { echo "no version of botocore could be installed, so none was tested"; exit 1; }

test-web: $(VENV)/.installed-web
	CKPTSYNC_TEST_BROWSER=1 $(BIN)/python -m tests.support.run_again -rs tests/web/browser

pictures: $(VENV)/.installed-web
	$(BIN)/python -m tests.web.browser.pictures docs/pictures

lint: $(VENV)/.installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/mypy
	@if command -v tsc >/dev/null; then echo tsc --project .; tsc --project .; \
	else echo "tsc: left out, it is not installed (Debian: node-typescript)"; fi

release: $(RELEASE_VENV)/.installed
	rm -rf build/release
	$(RELEASE_VENV)/bin/python -m build --outdir build/release
	$(RELEASE_VENV)/bin/twine check --strict build/release/*
	$(RELEASE_VENV)/bin/shiv --quiet --extend-pythonpath --console-script ckptsync --python '/usr/bin/env python3' \
	  --output-file build/release/ckptsync.pyz "$$(ls $(CURDIR)/build/release/*.whl)[s3,alerts,fsspec]"
	CKPTSYNC_TEST_RELEASE=build/release $(RELEASE_VENV)/bin/python -m pytest -q --noconftest tests/release

man: $(VENV)/.installed-test
	mkdir -p build
	$(BIN)/argparse-manpage --module ckptsync.cli.main --function whole_parser --prog ckptsync \
	  --project-name ckptsync --format single-commands-section --output build/ckptsync.1

# A copy of the documents and of the files that they link to: MkDocs takes no page from outside its
# directory. It takes README.md as the first page.
docs: $(DOCS_VENV)/.installed
	rm -rf build/site-source build/site
	mkdir -p build/site-source
	cp -R README.md README.zh.md CONTRIBUTING.md CHANGELOG.md LICENSE configs docs systemd build/site-source
	rm build/site-source/docs/requirements.txt
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build

format: $(VENV)/.installed-test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(BENCH_VENV)/.installed bench-beside bench-idle bench-hook
	$(BENCH_VENV)/bin/python -m benchmarks.merge --gib $(GIB) --rounds $(ROUNDS) --cold $(COLD) --tensors $(TENSORS) --memory-gib $(MEMORY_GIB) --counts $(PLAN_COUNTS) --llamafactory '$(LLAMAFACTORY)'
	$(BENCH_VENV)/bin/python -m benchmarks.report build/bench > docs/benchmarks.md.new
	mv docs/benchmarks.md.new docs/benchmarks.md

bench-transfer: $(TRANSFER_VENV)/.installed $(BENCH_VENV)/.installed
	$(TRANSFER_VENV)/bin/python -m benchmarks.transfer --one $(ONE) --many $(MANY) --small $(SMALL) --mix $(MIX) --sftp $(SFTP) --merge $(MERGE) --generator $(BENCH_VENV)/bin/python --rounds $(ROUNDS) --work $(WORK) --tools '$(TOOLS)' --document docs/benchmarks-transfer.md

campaign-trainers: $(VENV)/.installed-test $(BENCH_VENV)/.installed
	$(BIN)/python -m tests.campaigns.trainers --python $(BENCH_VENV)/bin/python $(TRAINERS)

campaign-in-front: $(VENV)/.installed-test $(BENCH_VENV)/.installed
	$(BIN)/python -m tests.campaigns.in_front --python $(BENCH_VENV)/bin/python $(IN_FRONT)

campaign-llamafactory: $(VENV)/.installed-test $(LLAMAFACTORY_VENV)/.installed
	$(BIN)/python -m tests.campaigns.trainers --python $(LLAMAFACTORY_VENV)/bin/python --modes llamafactory --hooks hook embedded --ranks 1 $(LLAMAFACTORY)

campaign-trl: $(VENV)/.installed-test $(TRL_VENV)/.installed
	$(BIN)/python -m tests.campaigns.trainers --python $(TRL_VENV)/bin/python --modes sft dpo grpo named best hub --ranks 1 $(TRL)

campaign-names: $(VENV)/.installed-test
	$(BIN)/python -m tests.campaigns.names_of $(NAMES)

campaign-doctor: $(VENV)/.installed-test
	$(BIN)/python -m tests.campaigns.doctor $(DOCTOR)

bench-killed: $(TRANSFER_VENV)/.installed
	$(TRANSFER_VENV)/bin/python -m benchmarks.killed --document docs/benchmarks-killed.md $(KILLED_TRANSFERS)

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

bench-verify: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.verify --document docs/benchmarks-verify.md $(VERIFY)

guides: $(VENV)/.installed-test $(BENCH_VENV)/.installed-lightning $(BENCH_VENV)/.installed-ray
	CKPTSYNC_TEST_TRAINERS=$(abspath $(BENCH_VENV))/bin/python $(BIN)/python -m pytest -rs tests/test_guides.py

kill: $(VENV)/.installed-test
	$(BIN)/python -m tests.campaigns.kill $(KILL)

crash-states: $(VENV)/.installed-test
	$(BIN)/python -m tests.campaigns.crash_states $(CRASH)

nspawn: $(VENV)/.installed-test
	CKPTSYNC_TEST_NSPAWN=1 $(BIN)/python -m tests.support.run_again -rs tests/nspawn

slurm: $(VENV)/.installed-test
	CKPTSYNC_TEST_SLURM=1 $(BIN)/python -m tests.support.run_again -rs tests/slurm

clean:
	rm -rf $(VENV) $(DOCS_VENV) $(BENCH_VENV) $(TRANSFER_VENV) $(LLAMAFACTORY_VENV) $(TRL_VENV) $(RELEASE_VENV) build/bench

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and f"{sys.executable} is Python {sys.version.split()[0]}, 3.10 or newer is needed: PYTHON=python3.12 make ...")'
	$(PYTHON) -m venv $(VENV)

# Installed in place, so that a change of the code needs no second installation; a change of these files does.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(PIP) --editable .
	@touch $@

# Without compiling: tests import few of the modules, and Python keeps what it compiles.
$(VENV)/.installed-test: pyproject.toml tests/requirements.txt tests/support/get_sshd.sh | $(BIN)/python
	$(PIP) --no-compile --requirement tests/requirements.txt --editable '.[test,load]'
	@tests/support/get_sshd.sh $(VENV)
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-web: $(VENV)/.installed-test
	$(PIP) --editable '.[test-web]'
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

# LLaMA-Factory imports torchaudio always. PyPI has it only for torch with CUDA, so beside a CPU
# build an empty module replaces it.
$(LLAMAFACTORY_VENV)/.installed: pyproject.toml tests/campaigns/llamafactory.txt
	$(PYTHON) -m venv $(LLAMAFACTORY_VENV)
	$(LLAMAFACTORY_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --requirement tests/campaigns/llamafactory.txt --editable .
	$(LLAMAFACTORY_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llamafactory==0.9.5
	$(LLAMAFACTORY_VENV)/bin/python -c 'import torchaudio' 2> /dev/null || touch "$$($(LLAMAFACTORY_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torchaudio.py"
	$(LLAMAFACTORY_VENV)/bin/ckptsync hook install
	@touch $@

$(TRL_VENV)/.installed: pyproject.toml tests/campaigns/trl.txt
	$(PYTHON) -m venv $(TRL_VENV)
	$(TRL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --requirement tests/campaigns/trl.txt --editable .
	@touch $@

$(DOCS_VENV)/.installed: docs/requirements.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --requirement docs/requirements.txt
	@touch $@

$(RELEASE_VENV)/.installed: tests/release/requirements.txt
	$(PYTHON) -m venv $(RELEASE_VENV)
	$(RELEASE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --requirement tests/release/requirements.txt
	@touch $@

# rclone, sftp and rsync are the system's: the report names those that are missing.
$(TRANSFER_VENV)/.installed: pyproject.toml benchmarks/requirements-transfer.txt
	$(PYTHON) -m venv $(TRANSFER_VENV)
	$(TRANSFER_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --requirement benchmarks/requirements-transfer.txt --editable '.[s3]'
	@touch $@
