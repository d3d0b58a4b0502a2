# SPDX-License-Identifier: GPL-2.0
#
# Every command a developer or a user types. All of them set up, once, the root file system in which
# everything is built and run (scripts/setup), so the host needs only root, make and debootstrap.

SHELL := /bin/bash
NODES ?= 2
FABRIC ?= rxe
export FABRIC

in-root := scripts/in-root
kbuild = $(in-root) make -s -C /usr/src/kite-linux M=/kite$(2) MO=/kite/$(1) \
	$(if $(2),KBUILD_EXTRA_SYMBOLS=/kite/build/Module.symvers) \
	CROSS_COMPILE=x86_64-linux-gnu- HOSTCC=gcc-14 KRUSTFLAGS=-Dwarnings CONFIG_DEBUG_INFO_BTF_MODULES=
cargo := $(in-root) cargo

.PHONY: all module userlib demo test bench check cluster rust-analyzer clean setup help

all: module userlib ## build the module (build/kite.ko) and the programs (target/release)

setup: ## build the root file system, once
	@scripts/setup

module: setup ## build build/kite.ko
	@mkdir -p build
	@$(call kbuild,build) modules
	@mkdir -p build/user
	@$(call kbuild,build/user,/tests/module) modules

userlib: setup ## build the command, the daemon and the libraries
	@$(cargo) build -q --release -p kite-cli -p kited -p libkite

test: all ## unit, property and cluster tests; the last line is the totals
	@scripts/test

check: setup ## formatting, lints and style of everything, warnings denied
	@scripts/check

cluster: module userlib ## a cluster with a shell on each node: make cluster NODES=3 FABRIC=rxe
	@KITE_ENV="FABRIC=$(FABRIC)" $(cargo) run -q -p kite-cluster --bin cluster -- --nodes $(NODES)

clean: ## remove what was built, but not the root file system
	rm -rf build build-* target rust-project.json

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
