# SPDX-License-Identifier: GPL-2.0
#
# Every command a developer or a user types. All of them set up, once, the root file system in which
# everything is built and run (scripts/setup), so the host needs only root, make, and apt or debootstrap.

SHELL := /bin/bash
NODES ?= 2
FABRIC ?= connectx
PREFIX ?= /usr/local
LIBDIR ?= $(PREFIX)/lib
export FABRIC PREFIX LIBDIR DESTDIR

in-root := scripts/in-root
# $(call kbuild,OUTPUT,SOURCE): the first folder of OUTPUT says for which kernel.
build = $(firstword $(subst /, ,$(1)))
kbuild = $(in-root) make -s -C /usr/src/$(if $(filter build-debug,$(build)),kite-debug,kite-linux) \
	M=/kite$(2) MO=/kite/$(1) $(if $(2),KBUILD_EXTRA_SYMBOLS=/kite/$(build)/Module.symvers) \
	CROSS_COMPILE=x86_64-linux-gnu- HOSTCC=gcc-14 KRUSTFLAGS=-Dwarnings CONFIG_DEBUG_INFO_BTF_MODULES=
cargo := $(in-root) cargo

.PHONY: all module userlib connectx install demo test test-debug bench fuzz check cluster rust-analyzer clean setup \
	help

all: module userlib ## build the module (build/kite.ko) and the programs (target/release)

setup: ## build the root file system, once
	@scripts/setup

module: setup ## build build/kite.ko
	@mkdir -p build
	@$(call kbuild,build) modules
	@mkdir -p build/user
	@$(call kbuild,build/user,/tests/module) modules

userlib: setup ## build the command, the daemon and the libraries
	@$(cargo) build --release -p kite-cli -p kited -p libkite -p libkite-verbs
	@$(in-root) scripts/describe

install: ## copy what was built: make install PREFIX=/usr/local DESTDIR=
	@scripts/install

connectx: setup ## build the software ConnectX (target/release/connectx)
	@$(cargo) build --release -p connectx

# What a fabric needs to be built.
fabric := $(filter connectx,$(FABRIC))

demo: module userlib $(fabric) ## two nodes share a file by name, and one of them dies
	@KITE_ENV="FABRIC=$(FABRIC)" $(cargo) run -q -p kite-demo

test: all connectx ## unit, property and cluster tests; the last line is the totals
	@$(cargo) build --release -p kite-workload -p kite-race
	@scripts/test $(ONLY)

# Not those of rdma-core and of the software ConnectX, which say little about kite and take long there.
debuggable := $(filter-out connectx pyverbs,$(basename $(notdir $(wildcard tests/cluster/tests/*.rs))))

test-debug: all connectx ## cluster tests on a kernel that checks locks and memory
	@scripts/setup-debug
	@mkdir -p build-debug/user build-debug/faulty
	@$(call kbuild,build-debug) modules
	@$(call kbuild,build-debug/user,/tests/module) modules
	@$(call kbuild,build-debug/faulty,/tests/faulty) modules
	@$(cargo) build --release -p kite-workload -p kite-race
	@KITE_KERNEL=debug scripts/test $(or $(ONLY),$(debuggable))

bench: module userlib $(fabric) ## kite beside user-space verbs and TCP on two nodes: make bench ROUNDS=5 FABRIC=rxe, or ICOUNT=1
	@$(cargo) build --release -p kite-bench -p kite-workload
	@KITE_ENV="FABRIC=$(FABRIC)" $(in-root) target/release/kite-bench \
		$(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(ICOUNT),--instructions)

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
	rm -rf build build-debug target rust-project.json

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
