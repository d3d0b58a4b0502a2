// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Simulation of a cluster of state machines, with faults in any order.
//!
//! After the last fault, all nodes must reach the same view, in which all nodes are reachable.

mod cluster;
mod fault;
mod host;
mod kernel;
mod network;
mod rdma;
mod scenarios;
mod schedule;

use std::panic::catch_unwind;

use schedule::Schedule;

/// Schedules of one test run, for clusters with a seed and for those with a store.
const SCHEDULES: u64 = 5_000;

/// Variable with the number of schedules to run in place of [`SCHEDULES`].
const SCHEDULES_VARIABLE: &str = "KITED_SCHEDULES";

/// Variable with the number of the first schedule.
const FIRST_VARIABLE: &str = "KITED_FIRST_SCHEDULE";

fn number_from_env(variable: &str, default: u64) -> u64 {
    let value = std::env::var(variable).ok();
    value.map_or(default, |value| value.parse().expect(variable))
}

/// Runs part `part` of `parts` of the schedules, for clusters with a seed or a store.
fn run_schedules(part: u64, parts: u64, has_store: bool) {
    let count = number_from_env(SCHEDULES_VARIABLE, SCHEDULES);
    let first = number_from_env(FIRST_VARIABLE, 0);
    for number in (first..first + count).filter(|number| number % parts == part) {
        if let Err(panic) = catch_unwind(|| Schedule::new(number, has_store).run()) {
            let shortest = Schedule::new(number, has_store).shrink();
            eprintln!("schedule {number} fails, also as {shortest:?}");
            catch_unwind(|| shortest.run()).expect_err("the shortest schedule fails");
            std::panic::resume_unwind(panic);
        }
    }
}

#[test]
fn random_schedules_end_no_incarnation_and_heal_part_0() {
    run_schedules(0, 2, false);
}

#[test]
fn random_schedules_end_no_incarnation_and_heal_part_1() {
    run_schedules(1, 2, false);
}

#[test]
fn random_schedules_with_a_store_end_no_incarnation_and_heal_part_0() {
    run_schedules(0, 2, true);
}

#[test]
fn random_schedules_with_a_store_end_no_incarnation_and_heal_part_1() {
    run_schedules(1, 2, true);
}
