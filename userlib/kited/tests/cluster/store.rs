// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Clusters with a store: etcd servers, and daemons without connections to each other.

use std::os::unix::net::UnixDatagram;
use std::thread;

use kited::key::Key;
use kited::node::Shutdown;

use crate::mock::{temporary_directory, wait, ClusterConfig, Etcd, MockKernel, TestDaemon};
use crate::{identities, is_reachable_in_all, is_view_of_all, node_numbers};

/// Starts daemons one after the other, so that the first one is the coordinator.
fn start_daemons(etcd: &Etcd, count: u8) -> Vec<TestDaemon> {
    let mut daemons = Vec::new();
    for gid in 1..=count {
        add_daemon(&mut daemons, etcd, MockKernel::new(gid));
    }
    daemons
}

fn add_daemon(daemons: &mut Vec<TestDaemon>, etcd: &Etcd, kernel: MockKernel) {
    daemons.push(TestDaemon::of_store(
        kernel,
        &etcd.url(),
        ClusterConfig::default(),
    ));
    wait("all to be in", || {
        is_view_of_all(daemons, &node_numbers(daemons.len()))
    });
}

/// Waits until the coordinator has published the hosts of exactly these daemons: all have links to it.
fn wait_for_links(daemons: &[TestDaemon]) {
    let hosts = |daemon: &TestDaemon| daemon.kernel.hosts().len();
    wait("all hosts", || {
        daemons.iter().all(|daemon| hosts(daemon) == daemons.len())
    });
}

#[test]
fn nodes_join_and_leave_without_a_seed() {
    let etcd = Etcd::start("join", 1);
    let mut daemons = start_daemons(&etcd, 3);
    let secrets = identities(&daemons).into_iter().map(|i| i.unwrap().secret);
    let mut secrets: Vec<_> = secrets.collect();
    secrets.dedup();
    assert_eq!(secrets.len(), 1);
    wait_for_links(&daemons);
    // The first one is the coordinator. It processes its own goodbye.
    daemons.remove(0).stop(Shutdown::Leave).unwrap();
    wait("the node to be removed", || {
        is_view_of_all(&daemons, &[2, 3])
    });
    wait_for_links(&daemons);
    daemons.remove(0).stop(Shutdown::Leave).unwrap();
    wait("the node to be removed", || is_view_of_all(&daemons, &[3]));
    let kernel = MockKernel::new(1);
    daemons.push(TestDaemon::of_store(
        kernel,
        &etcd.url(),
        ClusterConfig::default(),
    ));
    wait("the node to have its number", || {
        is_view_of_all(&daemons, &[1, 3])
    });
}

#[test]
fn another_daemon_continues_for_a_killed_coordinator() {
    let etcd = Etcd::start("killed", 1);
    let mut daemons = start_daemons(&etcd, 3);
    let before = identities(&daemons);
    daemons.remove(0).kill();
    wait("the coordinator's node to be unreachable", || {
        is_reachable_in_all(&daemons, &[2, 3])
    });
    assert_eq!(identities(&daemons), before[1..]);
    let kernel = MockKernel::new(1);
    daemons.push(TestDaemon::of_store(
        kernel,
        &etcd.url(),
        ClusterConfig::default(),
    ));
    wait("the node to return", || {
        is_reachable_in_all(&daemons, &[1, 2, 3])
    });
    assert_eq!(identities(&daemons[..2]), before[1..]);
}

#[test]
fn paused_coordinator_is_replaced_and_no_view_changes() {
    let etcd = Etcd::start("paused", 1);
    let mut daemons = start_daemons(&etcd, 3);
    let (before, view) = (identities(&daemons), daemons[0].kernel.view());
    let pause = daemons[0].pause_lock();
    let pause = daemons[0].pause_on(&pause);
    thread::sleep(5 * daemons[0].config().timing.dead_after);
    assert_eq!(daemons[1].kernel.view(), view, "its kernel replies");
    drop(pause);
    add_daemon(&mut daemons, &etcd, MockKernel::new(4));
    assert_eq!(identities(&daemons[..3]), before);
}

#[test]
fn store_without_quorum_changes_no_view() {
    let mut etcd = Etcd::start("quorum", 3);
    let mut daemons = start_daemons(&etcd, 3);
    let (before, view) = (identities(&daemons), daemons[0].kernel.view());
    (1..3).for_each(|server| etcd.kill(server));
    let kernel = MockKernel::new(4);
    daemons.push(TestDaemon::of_store(
        kernel,
        &etcd.url(),
        ClusterConfig::default(),
    ));
    thread::sleep(5 * daemons[0].config().timing.dead_after);
    let is_unchanged = |daemon: &TestDaemon| daemon.kernel.view() == view;
    assert!(daemons[..3].iter().all(is_unchanged));
    assert_eq!(daemons[3].kernel.view(), None);
    (1..3).for_each(|server| etcd.restart(server));
    wait("the new node to join", || {
        is_reachable_in_all(&daemons, &[1, 2, 3, 4])
    });
    assert_eq!(identities(&daemons[..3]), before);
}

#[test]
fn killed_servers_of_a_store_are_replaced_by_the_others() {
    let mut etcd = Etcd::start("servers", 3);
    let mut daemons = start_daemons(&etcd, 2);
    let before = identities(&daemons);
    for (server, gid) in (0..3).zip(3..) {
        etcd.kill(server);
        add_daemon(&mut daemons, &etcd, MockKernel::new(gid));
        etcd.restart(server);
    }
    assert_eq!(identities(&daemons[..2]), before);
}

#[test]
fn restarted_daemons_of_a_store_keep_incarnations_and_view() {
    let etcd = Etcd::start("restart", 1);
    let kernels: Vec<MockKernel> = (1..=3).map(MockKernel::with_stored_session).collect();
    let mut daemons = Vec::new();
    for kernel in &kernels {
        add_daemon(&mut daemons, &etcd, kernel.clone());
    }
    let before = identities(&daemons);
    for daemon in daemons.drain(..) {
        daemon.stop(Shutdown::Detach).unwrap();
    }
    let config = ClusterConfig::default();
    let start =
        |kernel: &MockKernel| TestDaemon::of_store(kernel.clone(), &etcd.url(), config.clone());
    daemons.extend(kernels.iter().map(start));
    add_daemon(&mut daemons, &etcd, MockKernel::new(4));
    assert_eq!(identities(&daemons[..3]), before);
}

#[test]
fn daemon_with_another_key_disturbs_no_cluster() {
    let etcd = Etcd::start("key", 1);
    let mut daemons = start_daemons(&etcd, 2);
    let (before, view) = (identities(&daemons), daemons[0].kernel.view());
    let config = ClusterConfig {
        key: Some(Key::new(b"another key of the tests")),
        ..ClusterConfig::default()
    };
    let stranger = TestDaemon::of_store(MockKernel::new(9), &etcd.url(), config);
    thread::sleep(3 * daemons[0].config().timing.dead_after);
    assert_eq!(stranger.kernel.view(), None);
    assert_eq!(daemons[1].kernel.view(), view);
    // It cannot become the coordinator either.
    let first = daemons.remove(0);
    first.stop(Shutdown::Leave).unwrap();
    wait("the first node to be removed", || {
        is_view_of_all(&daemons, &[2])
    });
    assert_eq!(identities(&daemons), before[1..]);
}

#[test]
fn every_daemon_of_a_store_evicts_unreachable_nodes() {
    let etcd = Etcd::start("evict", 1);
    let mut daemons = start_daemons(&etcd, 2);
    let directory = temporary_directory("evict-control");
    let config = ClusterConfig {
        control_directory: Some(directory.clone()),
        ..ClusterConfig::default()
    };
    daemons.push(TestDaemon::of_store(
        MockKernel::new(3),
        &etcd.url(),
        config,
    ));
    wait("all to be in", || is_view_of_all(&daemons, &[1, 2, 3]));
    let lost = daemons.remove(1);
    let incarnation = lost.kernel.identity().unwrap().incarnation;
    lost.kill();
    wait("the node to be unreachable", || {
        is_reachable_in_all(&daemons, &[1, 3])
    });
    let socket = UnixDatagram::unbound().unwrap();
    let path = std::fs::read_dir(&directory).unwrap().next().unwrap();
    let request = format!("evict 2 {incarnation:x}");
    socket
        .send_to(request.as_bytes(), path.unwrap().path())
        .unwrap();
    wait("the node to be evicted", || {
        is_view_of_all(&daemons, &[1, 3])
    });
    std::fs::remove_dir_all(directory).unwrap();
}
