# SPDX-License-Identifier: GPL-2.0
#
# Every command a developer or a user types. All of them set up, once, the root file system in which
# everything is built and run (scripts/setup), so the host needs only root, make, and apt or debootstrap.

SHELL := /bin/bash
NODES ?= 2
FABRIC ?= connectx
PREFIX ?= /usr/local
LIBDIR ?= $(PREFIX)/lib
export FABRIC PREFIX LIBDIR DESTDIR REVISION KEY CERT

# Of a kernel series other than the default, what is built is in build-SERIES.
BUILD := build$(addprefix -,$(SERIES))

# Empty where the root is entered already. Then nothing is set up, and the checkout need not be at /kite.
in-root := scripts/in-root
checkout := /kite
krustflags := -Dwarnings
cargo-options :=
# $(call kbuild,OUTPUT,SOURCE): the suffix of OUTPUT's first folder selects the kernel.
build = $(firstword $(subst /, ,$(1)))
tree = $(if $(filter build-debug,$(build)),kite-debug,kite-linux$(patsubst build%,%,$(build)))
kbuild = $(in-root) make -s -C /usr/src/$(tree) \
	M=$(checkout)$(2) MO=$(checkout)/$(1) $(if $(2),KBUILD_EXTRA_SYMBOLS=$(checkout)/$(build)/Module.symvers) \
	CROSS_COMPILE=x86_64-linux-gnu- HOSTCC=gcc-14 KRUSTFLAGS="$(krustflags)" CONFIG_DEBUG_INFO_BTF_MODULES=
cargo := $(in-root) cargo

.PHONY: all module kite.ko older-module other-series userlib docs connectx install deb repo image demo test test-all test-long test-packages test-series test-debug bench bench-pictures fuzz check cluster rust-analyzer clean setup \
	help

all: module userlib ## build the module (build/kite.ko) and the programs (target/release)

setup: ## build the root file system, once, with kernel sources: make setup SERIES=all
	$(if $(in-root),@scripts/setup $(SERIES))

module: kite.ko ## build build/kite.ko, or build-7.2/kite.ko with SERIES=7.2
	@mkdir -p $(BUILD)/user
	@$(call kbuild,$(BUILD)/user,/tests/module) modules

kite.ko: setup
	@mkdir -p $(BUILD)
	@$(call kbuild,$(BUILD)) modules

# kite.ko without optional features, as that of an older version, for tests of upgrades.
older-module: krustflags += --cfg=kite_without_features
older-module: setup
	@mkdir -p $(BUILD)/older
	@$(call kbuild,$(BUILD)/older) modules

# The tested kernel series that the archive offers, but for the default.
other = $$($(in-root) cut -s -d ' ' -f 2- /etc/kite-series)

# kite.ko for them.
other-series: setup
	$(if $(in-root),@scripts/setup all)
	@for series in $(other); do \
		$(MAKE) --no-print-directory kite.ko SERIES=$$series || exit; \
	done

userlib: setup ## build the command, the daemon and the libraries
	@$(cargo) build --release $(cargo-options) -p kite-cli -p kited -p libkite -p libkite-verbs
	@$(in-root) scripts/describe

docs: setup ## build the book of docs/: target/book/index.html
	$(if $(in-root),@scripts/setup.d/docs)
	@$(in-root) mdbook build docs
	@$(in-root) scripts/lint/links.py target/book

install: ## copy what was built: make install PREFIX=/usr/local DESTDIR=
	@scripts/install

deb: setup ## Debian packages in target/deb, modules signed: make deb REVISION=1 KEY=key.pem CERT=cert.der
	@scripts/setup all
	@scripts/setup.d/packaging
	@scripts/package/deb

repo: deb ## signed apt repository in target/repo: make repo URI=https://host/kite
	@scripts/package/repo $(URI)

image: repo ## Debian with kite, one node over Soft-RoCE, that boots by UEFI: target/kite.qcow2
	@$(in-root) scripts/package/make-image /kite/target/repo target/kite.qcow2

connectx: setup ## build the software ConnectX (target/release/connectx)
	@$(cargo) build --release -p connectx

# What a fabric needs to be built.
fabric := $(filter connectx,$(FABRIC))

demo: module userlib $(fabric) ## two nodes share a file by name, and one of them dies
	@KITE_ENV="FABRIC=$(FABRIC)" $(cargo) run -q -p kite-demo

test: all connectx $(filter image,$(ONLY:packages=image)) ## unit, property and cluster tests; the last line is the totals
	@$(cargo) build --release -p kite-workload -p kite-race
	@scripts/test $(ONLY)

# Not those of rdma-core and of the software ConnectX, which say little about kite and take long on a debug kernel,
# and not those of packages, which choose kernels themselves.
on-clusters = $(filter-out connectx packages pyverbs,$(sort $(shell scripts/test --clusters)))

test-all: ## make test with the long tests, tests of packages, and the cluster tests on the other tested kernel series
	@for part in $(test-parts); do \
		$(MAKE) --no-print-directory $$part || exit; \
	done

# The parts of test-all, one after the other. Packages have no test programs to select.
test-parts := test-long $(if $(ONLY),,test-packages) test-series

test-long test-packages test-series: export KITE_LONG := 1
test-long: other-series older-module
	@$(MAKE) --no-print-directory test

test-packages: connectx image
	@scripts/test packages

test-series: all connectx other-series
	@$(cargo) build --release -p kite-workload -p kite-race
	@for series in $(other); do \
		$(MAKE) --no-print-directory module older-module SERIES=$$series || exit; \
		KITE_KERNEL=$$series scripts/test $(or $(ONLY),$(on-clusters)) || exit; \
	done

test-debug: all connectx ## cluster tests on a kernel that checks locks and memory
	@scripts/setup.d/debug
	@mkdir -p build-debug/user build-debug/faulty
	@$(call kbuild,build-debug) modules
	@$(call kbuild,build-debug/user,/tests/module) modules
	@$(call kbuild,build-debug/faulty,/tests/faulty) modules
	@$(MAKE) --no-print-directory older-module BUILD=build-debug
	@$(cargo) build --release -p kite-workload -p kite-race
	@KITE_KERNEL=debug scripts/test $(or $(ONLY),$(on-clusters))

bench: module userlib $(fabric) ## kite beside user-space verbs and TCP on two nodes: make bench ROUNDS=5 FABRIC=rxe, or ICOUNT=1
	@$(cargo) build --release -p kite-bench -p kite-workload
	@KITE_ENV="FABRIC=$(FABRIC)" $(in-root) target/release/kite-bench \
		$(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(ICOUNT),--instructions)

bench-pictures: setup ## draw the pictures of docs/performance.md from docs/performance/bench.json
	@$(cargo) run -q --release -p kite-bench --bin kite-bench -- \
		--render docs/performance/bench.json --output docs/pictures/bench

fuzz: setup ## a fuzzer is the machine of a software ConnectX: make fuzz DURATION=60, in seconds for each target
	@scripts/fuzz $(or $(DURATION),60)

check: setup ## formatting, lints and style of everything, warnings denied
	@scripts/check

cluster: module userlib $(fabric) ## kite on a cluster, with a shell on each node: make cluster NODES=3 FABRIC=rxe
	@$(cargo) build --release -p kite-workload -p kite-race
	@KITE_ENV="FABRIC=$(FABRIC)" $(cargo) run -q -p kite-cluster --bin cluster -- --nodes $(NODES)

rust-analyzer: module ## write rust-project.json, for rust-analyzer on this host
	@$(call kbuild,build) rust-analyzer
	@$(in-root) scripts/rust-analyzer.py $(CURDIR) "$$(. scripts/lib.sh && echo "$$root")"

clean: ## remove what was built, but not the root file system
	rm -rf build build-* target rust-project.json

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
