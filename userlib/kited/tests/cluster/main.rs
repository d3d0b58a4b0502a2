// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Complete daemons on loopback, each with a thread, a runtime and a mock kernel.

mod mock;
mod reachability;
mod restart;
mod store;

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixDatagram;
use std::thread;

use kited::host::{Host, HostName};
use kited::key::Key;
use kited::membership::Identity;
use kited::node::Shutdown;
use kited::wire::{self, establish, HandshakeRole};
use mock::{wait, ClusterConfig, MockKernel, TestDaemon};

/// Starts a seed and `followers` followers, and waits until all have the same view.
fn start_cluster(followers: u8) -> Vec<TestDaemon> {
    start_cluster_with(followers, ClusterConfig::default())
}

fn start_cluster_with(followers: u8, config: ClusterConfig) -> Vec<TestDaemon> {
    let mut daemons = vec![TestDaemon::seed(MockKernel::new(1), "127.0.0.1:0", config)];
    for id in 0..followers {
        add_follower(&mut daemons, id + 2);
        // One after the other, since the seed assigns numbers in the order of joins.
        wait("all to be in", || {
            is_view_of_all(&daemons, &node_numbers(daemons.len()))
        });
    }
    daemons
}

/// Adds a follower whose kernel has this GID.
fn add_follower(daemons: &mut Vec<TestDaemon>, gid: u8) {
    let (seed, config) = (daemons[0].address(), daemons[0].config());
    daemons.push(TestDaemon::follower(MockKernel::new(gid), &seed, config));
}

fn node_numbers(count: usize) -> Vec<u32> {
    (1..).take(count).collect()
}

/// Returns `true` if the kernels of these daemons have applied the same view, with these members.
fn is_view_of_all(daemons: &[TestDaemon], members: &[u32]) -> bool {
    let view = daemons[0].kernel.view();
    let found: Vec<u32> = view
        .iter()
        .flat_map(|v| &v.members)
        .map(|m| m.node)
        .collect();
    found == members && daemons.iter().all(|daemon| daemon.kernel.view() == view)
}

/// Returns `true` if the kernels of these daemons have applied the same view, with these reachable members.
fn is_reachable_in_all(daemons: &[TestDaemon], nodes: &[u32]) -> bool {
    let view = daemons[0].kernel.view();
    let members = view.iter().flat_map(|v| &v.members);
    let reachable = members.filter(|m| m.is_reachable());
    let reachable: Vec<u32> = reachable.map(|m| m.node).collect();
    reachable == nodes && daemons.iter().all(|daemon| daemon.kernel.view() == view)
}

/// Returns `true` if the kernels of these daemons have applied the same view, whose members have these features.
fn are_features_in_all(daemons: &[TestDaemon], features: &[u64]) -> bool {
    let view = daemons[0].kernel.view();
    let members = view.iter().flat_map(|v| &v.members);
    let found: Vec<u64> = members.map(|m| m.features).collect();
    found == features && daemons.iter().all(|daemon| daemon.kernel.view() == view)
}

fn identities(daemons: &[TestDaemon]) -> Vec<Option<Identity>> {
    daemons.iter().map(|d| d.kernel.identity()).collect()
}

#[test]
fn nodes_join_and_report_ready() {
    let daemons = start_cluster(2);
    for (daemon, ready) in daemons.iter().zip([(1, 1), (2, 2), (3, 3)]) {
        wait("the ready report", || daemon.ready_reports() == [ready]);
    }
    let secret = daemons[0].kernel.identity().map(|identity| identity.secret);
    assert!(daemons
        .iter()
        .all(|d| d.kernel.identity().map(|i| i.secret) == secret));
}

#[test]
fn hosts_of_other_nodes_are_published_on_all_nodes() {
    let daemons = start_cluster(2);
    let host = Host {
        ip: [127, 0, 0, 1].into(),
        name: HostName::local(),
    };
    let at = |node: u32| (node, host.clone());
    wait("the hosts on all nodes", || {
        let has_hosts = |i: usize, hosts: &[_]| daemons[i].kernel.hosts() == hosts;
        let all = [at(1), at(2), at(3)];
        has_hosts(0, &all[1..]) && has_hosts(1, &all) && has_hosts(2, &all)
    });
}

#[test]
fn upgraded_node_returns_with_new_features_and_others_keep_theirs() {
    let config = ClusterConfig::default();
    let seed = TestDaemon::seed(MockKernel::with_features(1, 1), "127.0.0.1:0", config);
    let address = seed.address();
    let follower = |features| {
        let kernel = MockKernel::with_features(2, features);
        TestDaemon::follower(kernel, &address, ClusterConfig::default())
    };
    let mut daemons = vec![seed, follower(0)];
    wait("both features", || are_features_in_all(&daemons, &[1, 0]));
    let before = identities(&daemons);
    daemons.pop().unwrap().stop(Shutdown::Leave).unwrap();
    daemons.push(follower(u64::MAX));
    wait("the new features", || {
        are_features_in_all(&daemons, &[1, u64::MAX])
    });
    assert_eq!(identities(&daemons)[0], before[0]);
}

#[test]
fn stopped_node_without_checkpoint_leaves() {
    let mut daemons = start_cluster(2);
    let stopped = daemons.pop().unwrap();
    let kernel = stopped.kernel.clone();
    // Without a checkpoint the node leaves, although this shutdown permits a restart.
    stopped.stop(Shutdown::Detach).unwrap();
    assert_eq!(kernel.identity(), None, "its kernel is in no cluster");
    wait("the leaver to be removed", || {
        is_view_of_all(&daemons, &[1, 2])
    });
}

#[test]
fn second_host_with_the_same_gid_is_rejected() {
    let daemons = start_cluster(1);
    let before = identities(&daemons);
    let (seed, config) = (daemons[0].address(), daemons[0].config());
    let duplicate = TestDaemon::follower(MockKernel::new(2), &seed, config);
    let error = format!("{:#}", duplicate.join().unwrap_err());
    assert!(error.contains("node 2 is connected"), "{error}");
    assert_eq!(identities(&daemons), before);
}

#[test]
fn node_evicted_by_the_control_socket_joins_with_another_incarnation() {
    let directory = mock::temporary_directory("control");
    let config = ClusterConfig {
        control_directory: Some(directory.clone()),
        ..ClusterConfig::default()
    };
    let daemons = start_cluster_with(2, config);
    let before = identities(&daemons);
    let incarnation = before[1].unwrap().incarnation;
    let socket = UnixDatagram::unbound().unwrap();
    let path = fs::read_dir(&directory).unwrap().next().unwrap().unwrap();
    for request in ["evict 2", &format!("evict 2 {incarnation:x}")] {
        socket.send_to(request.as_bytes(), path.path()).unwrap();
    }
    wait("the node to join again", || {
        let identity = daemons[1].kernel.identity();
        identity.is_some_and(|i| i.incarnation != incarnation)
            && is_view_of_all(&daemons, &[1, 2, 3])
    });
    let after = identities(&daemons);
    assert_eq!([before[0], before[2]], [after[0], after[2]]);
    drop(daemons);
    fs::remove_dir_all(directory).unwrap();
}

#[test]
fn view_that_the_kernel_rejects_is_skipped() {
    let mut daemons = start_cluster(1);
    let before = identities(&daemons);
    daemons[1].kernel.fail_with_einval(1);
    for gid in [3, 4] {
        let (seed, config) = (daemons[0].address(), daemons[0].config());
        daemons.push(TestDaemon::follower(MockKernel::new(gid), &seed, config));
        wait("the node to join", || {
            daemons.iter().all(|d| d.kernel.identity().is_some())
        });
    }
    wait("all to be in", || {
        is_reachable_in_all(&daemons, &[1, 2, 3, 4])
    });
    assert_eq!(identities(&daemons[..2]), before);
}

#[tokio::test]
async fn connection_with_wrong_key_is_rejected() {
    let daemons = start_cluster(0);
    let stream = tokio::net::TcpStream::connect(daemons[0].address());
    let key = Key::new(b"another");
    let refused = establish(stream.await.unwrap(), HandshakeRole::Dialer, Some(&key)).await;
    assert!(matches!(refused, Err(wire::WireError::WrongKey)));
    assert!(is_view_of_all(&daemons, &[1]));
}

#[test]
fn node_without_key_fails_with_key_missing() {
    let daemons = start_cluster(0);
    let keyless = ClusterConfig {
        key: None,
        ..daemons[0].config()
    };
    let follower = TestDaemon::follower(MockKernel::new(9), &daemons[0].address(), keyless);
    let error = follower.join().unwrap_err();
    assert!(format!("{error:#}").contains("has a key"), "{error:#}");
    assert!(is_view_of_all(&daemons, &[1]));
}

/// An impostor at the address of the seed can send these replies without a key.
#[test]
fn impostor_without_key_does_not_end_a_daemon() {
    let address = mock::free_address();
    let impostor = mock::listen(&address);
    let follower = TestDaemon::follower(MockKernel::new(2), &address, ClusterConfig::default());
    for answer in [
        &b"kited\0\x01\x00"[..],
        b"kited\0\x02\x01",
        b"kited\0\x01\x01\x00\x00",
    ] {
        let mut stream = mock::accept(&impostor);
        stream.write_all(answer).unwrap();
        // Reads until the follower closes the connection.
        let _ = stream.read_to_end(&mut Vec::new());
    }
    drop(impostor);
    let seed = TestDaemon::seed(MockKernel::new(1), &address, ClusterConfig::default());
    let daemons = [seed, follower];
    wait("all to be in", || is_view_of_all(&daemons, &[1, 2]));
}

#[test]
fn silent_connections_do_not_block_a_join() {
    let mut daemons = start_cluster_with(0, ClusterConfig::without_dead_timeout());
    let connect = |_| TcpStream::connect(daemons[0].address()).unwrap();
    let _silent: Vec<TcpStream> = (0..200).map(connect).collect();
    add_follower(&mut daemons, 2);
    wait("the node to be in", || is_view_of_all(&daemons, &[1, 2]));
}

#[test]
fn kernel_that_rejects_join_ends_the_daemon() {
    let daemons = start_cluster(0);
    let kernel = MockKernel::new(2);
    kernel.reject_join();
    let refused = TestDaemon::follower(kernel, &daemons[0].address(), daemons[0].config());
    assert!(refused.join().is_err());
    wait("the node to be removed", || is_view_of_all(&daemons, &[1]));
}

#[test]
fn view_is_retried_while_the_kernel_is_out_of_memory() {
    let mut daemons = start_cluster(1);
    let before = identities(&daemons);
    daemons
        .iter()
        .for_each(|daemon| daemon.kernel.fail_with_enomem(u32::MAX));
    add_follower(&mut daemons, 3);
    thread::sleep(2 * daemons[0].config().timing.dead_after);
    daemons
        .iter()
        .for_each(|daemon| daemon.kernel.fail_with_enomem(0));
    wait("all to be in", || is_view_of_all(&daemons, &[1, 2, 3]));
    assert_eq!(identities(&daemons[..2]), before, "no incarnation changed");
}

#[test]
fn follower_started_before_the_seed_joins_later() {
    let address = mock::free_address();
    let early = mock::listen(&address);
    let follower = TestDaemon::follower(MockKernel::new(2), &address, ClusterConfig::default());
    // The first connection is closed at once, and the next one finds no socket.
    drop(mock::accept(&early));
    drop(early);
    let seed = TestDaemon::seed(MockKernel::new(1), &address, ClusterConfig::default());
    let daemons = [seed, follower];
    wait("all to be in", || is_view_of_all(&daemons, &[1, 2]));
}
