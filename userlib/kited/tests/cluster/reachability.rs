// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Nodes that do not respond by TCP, RDMA or both.

use std::thread;
use std::time::Instant;

use crate::mock::{wait, ClusterConfig, MockKernel, TestDaemon};
use crate::{
    add_follower, identities, is_reachable_in_all, is_view_of_all, node_numbers, start_cluster,
    start_cluster_with,
};

#[test]
fn killed_node_is_unreachable_until_it_joins_again() {
    let mut daemons = start_cluster(2);
    let dead = daemons.pop().unwrap();
    let former = dead.kernel.identity().unwrap();
    dead.kill();
    wait("the dead to be unreachable", || {
        is_reachable_in_all(&daemons, &[1, 2])
    });
    assert!(is_view_of_all(&daemons, &[1, 2, 3]), "not removed");

    add_follower(&mut daemons, 3);
    wait("all to be in again", || {
        is_reachable_in_all(&daemons, &[1, 2, 3])
    });
    assert_ne!(
        daemons[2].kernel.identity().unwrap().incarnation,
        former.incarnation
    );
}

#[test]
fn survivors_continue_without_the_seed_and_readmit_it() {
    let mut daemons = start_cluster(2);
    let before = identities(&daemons[1..]);
    let seed = daemons.remove(0);
    let (address, config) = (seed.address(), seed.config());
    seed.kill();
    wait("the seed to be unreachable", || {
        is_reachable_in_all(&daemons, &[2, 3])
    });

    daemons.insert(0, TestDaemon::seed(MockKernel::new(1), &address, config));
    wait("the seed to be back", || {
        is_reachable_in_all(&daemons, &[1, 2, 3])
    });
    assert_eq!(identities(&daemons[1..]), before);
}

#[test]
fn paused_node_stays_reachable() {
    for paused in [0, 2] {
        let daemons = start_cluster(2);
        let (view, before) = (daemons[0].kernel.view(), identities(&daemons));
        let pause = daemons[paused].pause();
        thread::sleep(4 * daemons[0].config().timing.dead_after);
        drop(pause);
        thread::sleep(daemons[0].config().timing.dead_after);
        assert!(daemons.iter().all(|daemon| daemon.kernel.view() == view));
        assert_eq!(identities(&daemons), before);
    }
}

#[test]
fn paused_node_that_misses_a_view_is_fenced_and_returns_in_its_incarnation() {
    let mut daemons = start_cluster(1);
    let before = identities(&daemons);
    let kernel = daemons[1].kernel.clone();
    let paused = daemons[1].pause_lock();
    let pause = daemons[1].pause_on(&paused);
    let (seed, config) = (daemons[0].address(), daemons[0].config());
    let third = TestDaemon::follower(MockKernel::new(3), &seed, config);
    wait("the paused to be fenced", || {
        let pair = [&daemons[0], &third];
        let view = pair[0].kernel.view().unwrap();
        view.find_member(2).is_some_and(|m| !m.is_reachable())
            && pair[1].kernel.view() == Some(view)
    });
    assert!(
        kernel.view().unwrap().find_reachable(2).is_some(),
        "not told"
    );
    drop(pause);
    daemons.push(third);
    wait("the paused to be back", || {
        is_reachable_in_all(&daemons, &[1, 2, 3])
    });
    assert_eq!(identities(&daemons[..2]), before);
}

#[test]
fn isolated_nodes_return_in_their_incarnations() {
    for isolated in [0, 2] {
        let daemons = start_cluster(2);
        let before = identities(&daemons);
        let kernel = &daemons[isolated].kernel;
        kernel.cut_rdma(true);
        let pause = daemons[isolated].pause();
        let others: Vec<u32> = node_numbers(3)
            .into_iter()
            .filter(|n| *n as usize != isolated + 1)
            .collect();
        let survivor = &daemons[1 - isolated.min(1)..][..1];
        wait("the isolated to be fenced", || {
            is_reachable_in_all(survivor, &others)
        });
        kernel.cut_rdma(false);
        drop(pause);
        wait("the isolated to be back", || {
            is_reachable_in_all(&daemons, &[1, 2, 3])
        });
        assert_eq!(identities(&daemons), before);
    }
}

#[test]
fn suspected_dead_node_is_unreachable_before_the_dead_timeout() {
    let daemons = start_cluster_with(2, ClusterConfig::with_dead_timeout(12));
    daemons[2].kernel.cut_rdma(true);
    let paused = daemons[2].pause();
    let start = Instant::now();
    daemons[1].kernel.report_suspect(3);
    wait("the suspect to be unreachable", || {
        is_reachable_in_all(&daemons[..2], &[1, 2])
    });
    assert!(start.elapsed() < daemons[0].config().timing.dead_after);
    drop(paused);
}

#[test]
fn node_with_slow_kernel_is_not_removed() {
    let mut daemons = start_cluster(1);
    let epoch = daemons[0].kernel.view().unwrap().epoch;
    let kernel = daemons[1].kernel.clone();
    let slow = kernel.block_apply();
    add_follower(&mut daemons, 3);
    // Longer than the dead timeout, so that a removal would be visible.
    thread::sleep(2 * daemons[0].config().timing.dead_after);
    drop(slow);
    wait("all to be in", || is_reachable_in_all(&daemons, &[1, 2, 3]));
    let now = daemons[0].kernel.view().unwrap().epoch;
    assert_eq!(now, epoch + 4, "no node was unreachable");
}
