// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Q counters.

use super::*;
use crate::layout::get;
use crate::layout::ifc::*;

/// Returns the number of messages that found no receive, by a set of counters. Resets the set if `clear`.
fn out_of_buffer(rig: &mut Rig, set: u32, clear: bool) -> u32 {
    let output = rig.query_counters(1, set, clear);
    get!(output, query_q_counter_out, out_of_buffer)
}

#[test]
fn counter_set_counts_for_its_qps_only() {
    let mut rig = Rig::new(2);
    let sets = [0; 2].map(|_| rig.simple(1, MLX5_CMD_OP_ALLOC_Q_COUNTER, 0));
    let mr = rig.mr(0, LENGTH);
    // Two queue pairs use the second set.
    for set in [sets[0], sets[1], sets[1]] {
        let cqs = [0, 1].map(|node| rig.cq(node, 4));
        let mut qps = [0, 1].map(|node| rig.qp(node, &Spec::new(Transport::Rc, cqs[node])));
        let options = Options {
            rnr_retries: 0,
            counters: set,
            ..Options::default()
        };
        rig.connect(&qps[0], &qps[1], &options);
        rig.post(&mut qps[0], &WorkRequest::send().local(&mr, 0, 8));
        rig.run();
    }
    assert_eq!(sets.map(|set| out_of_buffer(&mut rig, set, false)), [1, 2]);
    assert_eq!(out_of_buffer(&mut rig, sets[1], true), 2);
    assert_eq!(sets.map(|set| out_of_buffer(&mut rig, set, false)), [1, 0]);
}
