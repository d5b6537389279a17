# The README's two commands are `make up` and `make test`; the rest is for people who change llmgw.
SHELL := /bin/sh
PY := .venv/bin/python
UV := .venv/bin/uv
ARGS ?=
BENCH ?=
# Rooms that keep rows: their tests run on SQLite and again on PostgreSQL with Redis.
STORE_TESTS := tests/core tests/tenants tests/catalog tests/nodes tests/api
# What the compiled request path is tried with: a request's ways in, through and out, and how they fail.
COMPILED_TESTS := $(addprefix tests/routing/test_,attacks.py compiled.py fallbacks.py faults.py garbage.py gateway_limits.py \
	heads.py process.py requests.py serving.py streams.py traps_routing.py)

# Where this is set, every process compiles all that it imports anew: most of the time of one that begins.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: up fast test check coverage bench e2e docs lock clean

up: .venv/ready build/compiled
	@exec .venv/bin/llmgw up $(ARGS)

# The gateway's request path as machine code; without it, or once its source has changed, the source runs.
fast: .venv/ready
	@$(PY) -m llmgw.ops.compile

build/compiled:
	@$(PY) -m llmgw.ops.compile || true

test: .venv/dev-ready
	@sh tests/prepare.sh gcc python3-dev redis-server postgresql chromium nodejs npm
	$(PY) -m pytest -n 3 $(ARGS)
	LLMGW_TEST_STORE=postgresql $(PY) -m pytest -n 3 $(STORE_TESTS) $(ARGS)
	@$(PY) -m llmgw.ops.compile
	LLMGW_COMPILED=1 $(PY) -m pytest -n 3 $(COMPILED_TESTS) $(ARGS)

check: .venv/dev-ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/lint-imports --no-cache
	.venv/bin/mypy
	$(PY) manage.py check --fail-level WARNING
	$(PY) manage.py makemigrations --check --dry-run
	$(PY) docs/reference.py --check

coverage: .venv/dev-ready
	.venv/bin/coverage run -m pytest -q tests/core tests/tenants tests/catalog tests/nodes tests/routing tests/agent
	.venv/bin/coverage report

bench: .venv/bench-ready
	@sh tests/prepare.sh nginx-light
	@$(PY) -m llmgw.ops.compile
	@$(PY) -m tests.bench $(BENCH)

e2e: .venv/dev-ready
	$(PY) -m pytest -m e2e $(ARGS)

docs: .venv/dev-ready
	$(PY) docs/reference.py

lock:
	$(UV) pip compile -q --upgrade --generate-hashes --custom-compile-command "make lock" --universal --python-version 3.11 pyproject.toml --group build -o requirements.lock
	$(UV) pip compile -q --upgrade --generate-hashes --custom-compile-command "make lock" --universal --python-version 3.11 -c requirements.lock pyproject.toml --group build --group dev -o requirements-dev.lock
	$(UV) pip compile -q --upgrade --generate-hashes --custom-compile-command "make lock" --universal --python-version 3.11 -c requirements.lock pyproject.toml --group bench -o requirements-bench.lock

.venv/ready: requirements.lock pyproject.toml
	@sh llmgw/ops/environment.sh requirements.lock
	@touch $@

.venv/dev-ready: requirements-dev.lock .venv/ready
	@sh llmgw/ops/environment.sh requirements-dev.lock
	@touch $@

.venv/bench-ready: requirements-bench.lock .venv/dev-ready
	@sh llmgw/ops/environment.sh requirements-bench.lock
	@touch $@

clean:
	rm -rf .venv build data
