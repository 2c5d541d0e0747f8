# Every target installs what it needs: .venv is made at the first use (tools/bootstrap).
# ARGS goes to the command: make test ARGS="tests/core -x"; make demo ARGS=--smoke

.PHONY: help venv venv-of-demo compat demo demo-tests test guests quick test-oldest integrations loggers trl verl verl-wakeup ray namespaces backends fuzz soak chaos streams durable torn docs generate site site-tests live-tests perfetto-tests gpu contract contract-ray lint types types-mypy types-pyright types-tests bench bench-peer ci clean
.DEFAULT_GOAL := help

CONTRACT ?= ../shared/contract
STREAMS ?= ../streams.xz
# Two more than there are cores, as tests that start processes mostly wait for these; 4 at most.
PROCESSES ?= $(shell cores=$$(nproc); echo $$((cores < 2 ? 3 : 4)))
# For tests whose processes mostly wait for others: two files at a time, the longest first.
# What only uses the interface that users have. make test runs its tests if it differs from the commit that was pushed.
GUESTS = tests/live tests/cli/top tests/e2e/test_top.py tests/storage/stores
CODE_OF_GUESTS = $(addprefix src/transfer_queue/,live cli/top storage/stores interface.py)
PUBLISHED = $(shell git merge-base HEAD @{upstream} 2>/dev/null || echo HEAD)
SIDE_BY_SIDE = -n 2 --dist loadfile --no-loadscope-reorder
# The differential tests run this many times as many examples in `make fuzz` as in `make test`.
EXAMPLES_FACTOR ?= 100

# Without bytecode files each process of a run would rewrite the assertions of all test files again, which takes 10 s.
unexport PYTHONDONTWRITEBYTECODE

help:
	@echo "make demo      a GRPO training through one driver, then through the queue (4 minutes on 2 cores; ARGS=--smoke: one)"
	@echo "make demo-tests  the demo with workers that are killed, and Ctrl-C"
	@echo "make quick     few examples of the fast tests, in less than a minute: after each edit"
	@echo "make guests    the tests of what only uses the public interface: tq top, the server of the live page, stores"
	@echo "make test      the tests, in two processes more than there are cores (4 at most; PROCESSES=1: one after the other)"
	@echo "make test-oldest  the tests of values, clients and loaders with the oldest versions that pyproject.toml names"
	@echo "make integrations  the next three: tests with real libraries, each in an environment of its own (10 minutes)"
	@echo "make loggers   tq.SummaryLogger with the real W&B, SwanLab and MLflow, without a network"
	@echo "make trl       the tests of transfer_queue.integrations.trl, with the oldest and the newest supported version of TRL"
	@echo "make verl      the tests of the integration with verl, in an environment of their own"
	@echo "make verl-wakeup  the time from the end of a prompt to a batch, with verl's replay buffer and with this package's"
	@echo "make ray       the tests of the Ray runtime, on a cluster of this machine with one node and one with three"
	@echo "make namespaces  three nodes in network namespaces: speed between them with each store, nodes and store servers killed (root)"
	@echo "make backends  the tests of all storage backends: the same on each, local and under Ray"
	@echo "make fuzz      new invalid input for every decoder, and changed requests; then the differential tests of the data path"
	@echo "               with 100 times as many examples, of costly ones 10 times (EXAMPLES_FACTOR=10 takes a tenth of that)"
	@echo "make soak      100,000 batches through one partition (8 minutes); fails if a process grows"
	@echo "make chaos     10,000 simulated runs with faults, then real processes killed and stopped (15 minutes)"
	@echo "make streams   replays the recorded streams of STREAMS, and compares replies and states with those of the build that"
	@echo "               recorded them (python -m tests.simulation.streams record FILE --seeds 0..400)"
	@echo "make durable   a durable system of which all processes are killed at once, 200 times (15 minutes; ARGS='--kills 20')"
	@echo "make torn      10,000,000 row reads by processes against clear, replace, compact and drain; then random puts and"
	@echo "               gets of ragged rows with checksums, for a minute on each backend (ARGS='--mode rows' runs only these)"
	@echo "make docs      runs the tutorials, and the code blocks of README.md and docs/"
	@echo "make site      builds the documentation site in site/; open site/index.html"
	@echo "make site-tests  builds the site, and tests it in Chromium (of the system: apt-get install chromium)"
	@echo "make live-tests  the tests of the live page in Chromium"
	@echo "make perfetto-tests  opens traces in Perfetto, in Chromium"
	@echo "make contract  the tests of the public contract, from $(CONTRACT)"
	@echo "make contract-ray  the tests of the public contract under Ray"
	@echo "make gpu       tests and rates of a GPU, beside cudaMemcpy; skipped if there is none"
	@echo "make generate  writes the files that are generated: methods of clients, config.yaml, pages of the reference and others"
	@echo "make lint      ruff"
	@echo "make types     mypy on the package, the fault simulation and the benchmarks; pyright on user code"
	@echo "make bench     runs the benchmarks and writes docs/performance.md (20 minutes); one alone, without the page:"
	@echo "               .venv/bin/python -m benchmarks NAME"
	@echo "make bench-peer  the same, and measures alternatives: Ray, and the PyPI package TransferQueue"
	@echo "make compat    builds the compatibility wheel of the distribution TransferQueue, which has no files, in dist/"
	@echo "make ci        everything that CI runs"

venv:
	@tools/bootstrap dev

venv-of-demo:
	@tools/bootstrap demo

demo: venv-of-demo
	.venv/bin/tq demo $(ARGS)

demo-tests: venv
	.venv/bin/python -m pytest tests/e2e/test_grpo_run.py $(ARGS)

test: venv
	.venv/bin/python -m pytest -n $(PROCESSES) --dist loadfile --no-loadscope-reorder --ignore=tests/test_docs.py --ignore=tests/website \
		--ignore=tests/live/browser --ignore=tests/loggers --ignore=tests/perfetto --ignore=tests/typing --ignore=tests/e2e/test_grpo_run.py \
		--ignore=tests/e2e/test_ray.py --ignore=tests/e2e/test_ray_nodes.py \
		--ignore=tests/e2e/test_ray_demo.py --ignore=tests/e2e/test_ray_queue.py --ignore=tests/e2e/test_ray_takeover.py --ignore=tests/e2e/backends --ignore=tests/integrations \
		--ignore-glob='*test_conformance_*' $(addprefix --ignore=,$(GUESTS)) $(ARGS)
	@git diff --quiet $(PUBLISHED) -- $(GUESTS) $(CODE_OF_GUESTS) || $(MAKE) guests

guests: venv
	.venv/bin/python -m pytest $(SIDE_BY_SIDE) $(GUESTS) --ignore=tests/live/browser $(ARGS)

# Without the files that conftest.py names as the longest, and those below, and with 5 examples of each property.
NOT_QUICK = core/units core/ready core/state wire/buffers net/test_retries.py net/drivers/test_both_drivers.py \
	client/test_moving.py client/test_checkpoints.py client/test_large_tags.py
quick: venv
	.venv/bin/ruff check .
	.venv/bin/python -m pytest -n 2 --dist loadfile --quick -m "not slow" tests/core tests/client tests/wire tests/net \
		tests/metadata tests/test_imports.py $(addprefix --ignore=tests/,$(NOT_QUICK)) $(ARGS)

test-oldest:
	@tools/bootstrap_oldest
	.oldest/bin/python -m pytest -n $(PROCESSES) --dist loadfile tests/wire tests/dataloader tests/client/test_kv.py \
		tests/client/test_put.py tests/client/test_get_data.py tests/client/test_get_meta.py \
		tests/client/test_await_data.py tests/client/test_field_dtypes.py tests/client/data/test_known_fields.py \
		tests/client/test_left_out.py tests/client/test_nested_tables.py tests/client/conversion/test_arguments.py tests/core/tables/test_field_types.py \
		tests/core/puts/test_decide.py tests/core/claims/test_deal.py tests/core/state/test_serialization.py tests/test_metadata.py \
		tests/metadata/test_field_columns.py tests/config $(ARGS)

integrations: loggers trl verl

loggers:
	@tools/bootstrap_loggers
	.loggers/bin/python -m pytest tests/loggers $(ARGS)

trl:
	@tools/bootstrap_trl
	PYTHONPATH=$(CURDIR)/.trl/trl-oldest .trl/bin/python -m pytest -n 2 --dist loadfile tests/integrations/trl \
		--ignore=tests/integrations/trl/test_trl_example.py $(ARGS)
	.trl/bin/python -m pytest -n 2 --dist loadfile tests/integrations/trl $(ARGS)

# faulthandler_timeout: the processes of the example take a minute to start.
verl:
	@tools/bootstrap_verl
	.verl/bin/python -m pytest -o faulthandler_timeout=500 tests/integrations/verl $(ARGS)

verl-wakeup:
	@tools/bootstrap_verl
	.verl/bin/python -W ignore tests/long/verl_wakeup.py $(ARGS)

ray: venv
	.venv/bin/python -m pytest $(SIDE_BY_SIDE) tests/e2e/test_ray_nodes.py tests/e2e/test_ray.py \
		tests/e2e/test_ray_takeover.py tests/e2e/test_ray_demo.py tests/e2e/test_ray_queue.py $(ARGS)

namespaces: venv
	.venv/bin/python -W ignore tests/long/namespaces.py
	.venv/bin/python -W ignore tests/long/namespace_stores.py $(ARGS)

backends: venv
	.venv/bin/python -m pytest $(SIDE_BY_SIDE) tests/e2e/backends tests/storage/test_conformance_*.py $(ARGS)

fuzz: venv
	.venv/bin/python tests/fuzz/run.py $(ARGS)
	.venv/bin/python -m pytest -m differential --examples-factor $(EXAMPLES_FACTOR) -n $(PROCESSES) \
		-o faulthandler_timeout=3600 tests/wire tests/core tests/journal tests/storage tests/client

soak: venv
	.venv/bin/python -W ignore tests/long/soak.py $(ARGS)

chaos: venv
	.venv/bin/python -W ignore -m tests.simulation.chaos --seeds 0..10000 --processes 2
	.venv/bin/python -W ignore -m tests.simulation.chaos --stores --seeds 0..3000 --processes 2
	.venv/bin/python -W ignore -m tests.simulation.chaos --takeovers --seeds 0..3000 --processes 2
	.venv/bin/python -W ignore -m tests.simulation.lock_run --takeovers --seeds 0..500
	.venv/bin/python -W ignore tests/long/chaos.py $(ARGS)

streams: venv
	@test -f $(STREAMS) || { echo "no recorded streams at $(STREAMS); set STREAMS, or record them" >&2; exit 1; }
	.venv/bin/python -W ignore -m tests.simulation.streams replay $(STREAMS) $(ARGS)

durable: venv
	.venv/bin/python -W ignore tests/long/durable_kills.py $(ARGS)

torn: venv
	.venv/bin/python -W ignore tests/long/torn_reads.py $(ARGS)

docs: venv
	.venv/bin/python -m pytest -n $(PROCESSES) --dist worksteal tests/test_docs.py $(ARGS)

# NO_MKDOCS_2_WARNING: the theme announces another program at each build.
site: venv
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict $(ARGS)

site-tests: venv
	.venv/bin/python -m pytest tests/website $(ARGS)

live-tests: venv
	.venv/bin/python -m pytest tests/live/browser $(ARGS)

perfetto-tests: venv
	.venv/bin/python -m pytest tests/perfetto $(ARGS)

generate: venv
	.venv/bin/python tools/generate_surface.py
	.venv/bin/python tools/generate_configuration.py
	.venv/bin/python tools/make_reference.py
	.venv/bin/python tools/make_dashboard.py
	.venv/bin/python tools/make_tutorials.py
	.venv/bin/python tools/make_diagrams.py
	.venv/bin/python tools/make_figures.py

gpu: venv
	.venv/bin/python -m pytest -rs tests/gpu $(ARGS)
	.venv/bin/python -m benchmarks gpu

contract: venv
	@test -d $(CONTRACT) || { echo "no contract tests at $(CONTRACT); set CONTRACT" >&2; exit 1; }
	@folder=$$(mktemp -d -t tq-contract-XXXXXX) && trap 'rm -rf "$$folder"' EXIT && \
		TQ_RUNTIME_DIR=$$folder PYTHONDONTWRITEBYTECODE=1 .venv/bin/python -m pytest -p no:cacheprovider \
		-q --tb=short -o faulthandler_timeout=120 $(CONTRACT) $(ARGS)

contract-ray:
	@CONTRACT_RAY=1 $(MAKE) --no-print-directory contract

lint: venv
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

types: venv
	@$(MAKE) --no-print-directory --jobs=2 --output-sync types-mypy types-pyright types-tests

types-mypy:
	.venv/bin/mypy

types-pyright:
	.venv/bin/pyright

types-tests:
	.venv/bin/python -m pytest tests/typing

bench: venv
	.venv/bin/python -m benchmarks.performance $(ARGS)

bench-peer: venv
	@tools/make_peers
	.venv/bin/python -m benchmarks.performance --peers $(ARGS)

compat:
	@tools/make_compat_wheel $(ARGS)

ci:
	bash .ci/run

clean:
	rm -rf .venv .oldest .loggers .trl .verl .peers build dist runs site .mypy_cache .ruff_cache .hypothesis
