// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Clusters with a store: etcd servers, and daemons without connections to each other.

use std::os::unix::net::UnixDatagram;

use kited::key::Key;
use kited::node::Shutdown;

use crate::mock::{wait, ClusterConfig, Etcd, MockKernel, TestDaemon};
use crate::{are_features_in_all, identities, is_reachable_in_all, is_view_of_all, node_numbers};

fn start_daemon(etcd: &Etcd, kernel: MockKernel) -> TestDaemon {
    TestDaemon::of_store(kernel, etcd.store(), etcd.config())
}

/// Starts daemons one after the other, so that the first one is the coordinator.
fn start_daemons(etcd: &Etcd, count: u8) -> Vec<TestDaemon> {
    let mut daemons = Vec::new();
    for gid in 1..=count {
        add_daemon(&mut daemons, etcd, MockKernel::new(gid));
    }
    daemons
}

fn add_daemon(daemons: &mut Vec<TestDaemon>, etcd: &Etcd, kernel: MockKernel) {
    daemons.push(start_daemon(etcd, kernel));
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

/// Waits until the membership of a daemon is frozen for a reason with this text.
fn wait_for_frozen(daemon: &TestDaemon, text: &str) {
    wait(text, || {
        let reason = daemon.frozen_reason();
        reason.is_some_and(|reason| reason.contains(text))
    });
}

/// Waits until the membership of no daemon is frozen.
fn wait_for_thaw(daemons: &[TestDaemon]) {
    let is_frozen = |daemon: &TestDaemon| daemon.frozen_reason().is_some();
    wait("a coordinator", || !daemons.iter().any(is_frozen));
}

#[test]
fn nodes_join_and_leave_without_a_seed() {
    let etcd = Etcd::start("join", 1);
    let mut daemons = start_daemons(&etcd, 3);
    wait_for_links(&daemons);
    // The first one is the coordinator. It processes its own goodbye.
    daemons.remove(0).stop(Shutdown::Leave).unwrap();
    wait("the node to be removed", || {
        is_view_of_all(&daemons, &[2, 3])
    });
    wait_for_links(&daemons);
    daemons.remove(0).stop(Shutdown::Leave).unwrap();
    wait("the node to be removed", || is_view_of_all(&daemons, &[3]));
    daemons.push(start_daemon(&etcd, MockKernel::new(1)));
    wait("the node to have its number", || {
        is_view_of_all(&daemons, &[1, 3])
    });
}

#[test]
fn concurrent_first_starts_create_one_cluster_whose_secret_is_encrypted() {
    let etcd = Etcd::start("first", 1);
    let start = |gid| start_daemon(&etcd, MockKernel::new(gid));
    let daemons: Vec<TestDaemon> = (1..=4).map(start).collect();
    wait("one view", || is_view_of_all(&daemons, &[1, 2, 3, 4]));
    let identities = identities(&daemons).into_iter().map(Option::unwrap);
    let mut secrets: Vec<_> = identities.map(|identity| identity.secret).collect();
    secrets.dedup();
    let [secret] = secrets[..] else {
        panic!("{} secrets", secrets.len());
    };
    let values = etcd.values();
    assert!(values.iter().any(|value| value.len() > secret.len()));
    for value in values {
        assert!(!value.windows(secret.len()).any(|bytes| bytes == secret));
    }
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
    daemons.push(start_daemon(&etcd, MockKernel::new(1)));
    wait("the node to return", || {
        is_reachable_in_all(&daemons, &[1, 2, 3])
    });
    assert_eq!(identities(&daemons[..2]), before[1..]);
}

#[test]
fn paused_coordinator_is_replaced_and_no_view_changes() {
    let etcd = Etcd::start("paused", 1);
    let mut daemons = start_daemons(&etcd, 3);
    wait_for_links(&daemons);
    let (before, view) = (identities(&daemons), daemons[0].kernel.view());
    let pause = daemons[0].pause_lock();
    let pause = daemons[0].pause_on(&pause);
    wait("another coordinator", || {
        let hosts = |daemon: &TestDaemon| daemon.kernel.hosts().len();
        daemons[1..].iter().all(|daemon| hosts(daemon) == 2)
    });
    // Its kernel replies to the probes of the next coordinator.
    std::thread::sleep(3 * daemons[0].config().timing.dead_after);
    assert_eq!(daemons[1].kernel.view(), view);
    drop(pause);
    add_daemon(&mut daemons, &etcd, MockKernel::new(4));
    assert_eq!(identities(&daemons[..3]), before);
}

#[test]
fn store_without_quorum_freezes_the_view_until_the_quorum_returns() {
    let mut etcd = Etcd::start("quorum", 3);
    let mut daemons = start_daemons(&etcd, 3);
    wait_for_thaw(&daemons);
    let (before, view) = (identities(&daemons), daemons[0].kernel.view());
    (1..3).for_each(|server| etcd.kill(server));
    daemons.push(start_daemon(&etcd, MockKernel::new(4)));
    for daemon in &daemons {
        wait_for_frozen(daemon, "no quorum");
    }
    // Silence of this length is a fault while there is a coordinator.
    std::thread::sleep(3 * daemons[0].config().timing.dead_after);
    let is_unchanged = |daemon: &TestDaemon| daemon.kernel.view() == view;
    assert!(daemons[..3].iter().all(is_unchanged));
    assert_eq!(daemons[3].kernel.view(), None);
    (1..3).for_each(|server| etcd.restart(server));
    wait("the new node to join", || {
        is_reachable_in_all(&daemons, &[1, 2, 3, 4])
    });
    assert_eq!(identities(&daemons[..3]), before);
    wait_for_thaw(&daemons);
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
    let start = |kernel: &MockKernel| start_daemon(&etcd, kernel.clone());
    daemons.extend(kernels.iter().map(start));
    add_daemon(&mut daemons, &etcd, MockKernel::new(4));
    assert_eq!(identities(&daemons[..3]), before);
}

#[test]
fn daemon_with_another_key_disturbs_no_cluster() {
    let etcd = Etcd::start("key", 1);
    let mut daemons = start_daemons(&etcd, 2);
    let (before, view) = (identities(&daemons), daemons[0].kernel.view());
    for (gid, key, reason) in [
        (8, None, "start kited with --key"),
        (9, Some("another key"), "another daemon has another key"),
    ] {
        let config = ClusterConfig {
            key: key.map(|key| Key::new(key.as_bytes())),
            ..etcd.config()
        };
        let stranger = TestDaemon::of_store(MockKernel::new(gid), etcd.store(), config);
        wait_for_frozen(&stranger, reason);
        assert_eq!(stranger.kernel.view(), None);
        assert_eq!(daemons[1].kernel.view(), view);
        daemons.push(stranger);
    }
    // They cannot become the coordinator either.
    daemons.remove(0).stop(Shutdown::Leave).unwrap();
    wait("the first node to be removed", || {
        is_view_of_all(&daemons[..1], &[2])
    });
    assert_eq!(identities(&daemons)[..1], before[1..]);
}

#[test]
fn node_with_another_version_of_the_kernel_messages_is_rejected_with_both_versions() {
    let etcd = Etcd::start("version", 1);
    let daemons = start_daemons(&etcd, 1);
    let other = start_daemon(&etcd, MockKernel::of_other_version(2));
    let error = format!("{:#}", other.join().unwrap_err());
    assert!(
        error.contains("wire version 2, that of the cluster has 1: install the same version"),
        "{error}"
    );
    assert!(is_view_of_all(&daemons, &[1]));
}

#[test]
fn features_of_each_kernel_reach_all_others_by_any_coordinator() {
    let etcd = Etcd::start("features", 1);
    let mut daemons = Vec::new();
    for (gid, features) in [(1, 1), (2, u64::MAX), (3, 0)] {
        add_daemon(
            &mut daemons,
            &etcd,
            MockKernel::with_features(gid, features),
        );
    }
    assert!(are_features_in_all(&daemons, &[1, u64::MAX, 0]));
    // The first one is the coordinator.
    daemons.remove(0).stop(Shutdown::Leave).unwrap();
    daemons.push(start_daemon(&etcd, MockKernel::with_features(1, 3)));
    wait("the new features", || {
        are_features_in_all(&daemons, &[3, u64::MAX, 0])
    });
}

#[test]
fn store_with_tls_serves_daemons_with_a_certificate_only() {
    let etcd = Etcd::start_with_tls("tls");
    let stranger = TestDaemon::of_store(MockKernel::new(9), etcd.store_with(None), etcd.config());
    wait_for_frozen(&stranger, "store: https://");
    let daemons = start_daemons(&etcd, 2);
    assert_eq!(stranger.kernel.view(), None);
    assert!(is_view_of_all(&daemons, &[1, 2]));
    assert!(stranger.frozen_reason().is_some());
}

#[test]
fn every_daemon_of_a_store_evicts_unreachable_nodes() {
    let etcd = Etcd::start("evict", 1);
    let mut daemons = start_daemons(&etcd, 3);
    wait_for_thaw(&daemons);
    let lost = daemons.remove(1);
    let incarnation = lost.kernel.identity().unwrap().incarnation;
    lost.kill();
    wait("the node to be unreachable", || {
        is_reachable_in_all(&daemons, &[1, 3])
    });
    let socket = UnixDatagram::unbound().unwrap();
    let path = etcd.config().control_directory.unwrap();
    let request = format!("evict 2 {incarnation:x}");
    socket
        .send_to(request.as_bytes(), path.join("mock3.control"))
        .unwrap();
    wait("the node to be evicted", || {
        is_view_of_all(&daemons, &[1, 3])
    });
}
