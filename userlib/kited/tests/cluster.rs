// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Complete daemons on loopback, each with a thread, a runtime and a mock kernel.

mod mock;

use std::io::{Read, Write};
use std::net::TcpStream;

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

/// Returns `true` if the kernels of these daemons have applied the same view, with these reachable members.
fn is_view_of_all(daemons: &[TestDaemon], members: &[u32]) -> bool {
    let view = daemons[0].kernel.view();
    let found: Vec<u32> = view
        .iter()
        .flat_map(|v| &v.members)
        .filter(|m| m.is_reachable())
        .map(|m| m.node)
        .collect();
    found == members && daemons.iter().all(|daemon| daemon.kernel.view() == view)
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

/// Returns the identities of the kernels of these daemons.
fn identities(daemons: &[TestDaemon]) -> Vec<Option<Identity>> {
    daemons.iter().map(|d| d.kernel.identity()).collect()
}

#[test]
fn killed_node_is_unreachable_and_may_return() {
    let mut daemons = start_cluster(2);
    let dead = daemons.pop().unwrap();
    let former = dead.kernel.identity().unwrap();
    dead.kill();
    wait("the dead to be unreachable", || {
        is_view_of_all(&daemons, &[1, 2])
    });
    assert_eq!(daemons[0].kernel.view().unwrap().members.len(), 3);

    add_follower(&mut daemons, 3);
    wait("all to be in again", || {
        is_view_of_all(&daemons, &[1, 2, 3])
    });
    assert_ne!(
        daemons[2].kernel.identity().unwrap().incarnation,
        former.incarnation
    );
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

/// Starts a seed and a follower whose sessions and checkpoints are stored while their daemons restart.
fn start_stored_pair() -> Vec<TestDaemon> {
    let seed = TestDaemon::seed(
        MockKernel::with_stored_session(1),
        "127.0.0.1:0",
        ClusterConfig::default(),
    );
    let follower = TestDaemon::follower(
        MockKernel::with_stored_session(2),
        &seed.address(),
        seed.config(),
    );
    let daemons = vec![seed, follower];
    wait("all to be in", || is_view_of_all(&daemons, &[1, 2]));
    daemons
}

/// Starts a daemon in place of the one at `at`, which has ended.
fn restart_daemon(
    daemons: &mut Vec<TestDaemon>,
    at: usize,
    kernel: MockKernel,
    (address, config): (&str, ClusterConfig),
) {
    let daemon = match at {
        0 => TestDaemon::seed(kernel, address, config),
        _ => TestDaemon::follower(kernel, address, config),
    };
    daemons.insert(at, daemon);
    wait("the daemon to be ready", || {
        daemons[at].ready_reports().len() == 1
    });
}

#[test]
fn restarted_daemon_keeps_incarnation_and_view() {
    let mut daemons = start_stored_pair();
    let state_of = |daemons: &[TestDaemon]| -> Vec<_> {
        let kernels = daemons.iter().map(|daemon| &daemon.kernel);
        kernels
            .map(|kernel| (kernel.identity(), kernel.view()))
            .collect()
    };
    let before = state_of(&daemons);
    for (at, is_killed) in [(1, true), (0, true), (1, false), (0, false)] {
        let ended = daemons.remove(at);
        let (kernel, address, config) = (ended.kernel.clone(), ended.address(), ended.config());
        match is_killed {
            true => ended.kill(),
            false => ended.stop(Shutdown::Detach).unwrap(),
        }
        restart_daemon(&mut daemons, at, kernel, (&address, config));
        assert_eq!(daemons[at].ready_reports(), [(at as u32 + 1, 2)]);
        assert_eq!(state_of(&daemons), before, "{at} {is_killed}");
    }
    // Both daemons are connected again, so a third node can join.
    add_follower(&mut daemons, 3);
    wait("all to be in", || is_view_of_all(&daemons, &[1, 2, 3]));
    let former: Vec<_> = before.iter().map(|(identity, _)| *identity).collect();
    assert_eq!(identities(&daemons[..2]), former);
}

#[test]
fn restarted_daemon_without_checkpoint_gets_a_new_incarnation() {
    let mut daemons = start_stored_pair();
    let former = daemons[1].kernel.identity().unwrap();
    let ended = daemons.remove(1);
    let (kernel, address, config) = (ended.kernel.clone(), ended.address(), ended.config());
    ended.kill();
    restart_daemon(
        &mut daemons,
        1,
        kernel.without_checkpoint(),
        (&address, config),
    );
    wait("the node to join again", || {
        is_view_of_all(&daemons, &[1, 2])
    });
    let now = daemons[1].kernel.identity().unwrap();
    assert_ne!(now.incarnation, former.incarnation);
}

#[test]
fn shutdown_leave_with_stored_session_leaves_the_cluster() {
    let mut daemons = start_stored_pair();
    let leaver = daemons.pop().unwrap();
    let kernel = leaver.kernel.clone();
    leaver.stop(Shutdown::Leave).unwrap();
    assert_eq!(kernel.identity(), None, "its kernel is in no cluster");
    wait("the leaver to be removed", || {
        is_view_of_all(&daemons, &[1])
    });
}

#[test]
fn survivors_continue_without_the_seed_and_readmit_it() {
    let mut daemons = start_cluster(2);
    let before: Vec<_> = daemons[1..].iter().map(|d| d.kernel.identity()).collect();
    let seed = daemons.remove(0);
    let (address, config) = (seed.address(), seed.config());
    seed.kill();
    wait("the seed to be unreachable", || {
        is_view_of_all(&daemons, &[2, 3])
    });

    daemons.insert(0, TestDaemon::seed(MockKernel::new(1), &address, config));
    wait("the seed to be back", || {
        is_view_of_all(&daemons, &[1, 2, 3])
    });
    assert_eq!(
        before,
        daemons[1..]
            .iter()
            .map(|d| d.kernel.identity())
            .collect::<Vec<_>>()
    );
}

/// Starts a daemon with a stored session for each of these nodes, and gives the seed a state file.
fn start_with_state_file(name: &str) -> Vec<TestDaemon> {
    let file = std::env::temp_dir().join(format!("{name}-{}", std::process::id()));
    let _ = std::fs::remove_file(&file);
    let config = ClusterConfig {
        state_file: Some(file),
        ..ClusterConfig::default()
    };
    start_cluster_with(2, config)
}

#[test]
fn seed_restarted_with_its_state_file_keeps_members_that_connect_after_a_new_node() {
    let mut daemons = start_with_state_file("kited-newcomer");
    let before = identities(&daemons);
    let seed = daemons.remove(0);
    let late = daemons.pop().unwrap();
    let pause = late.pause();
    let (address, config) = (seed.address(), seed.config());
    seed.kill();
    daemons.insert(0, TestDaemon::seed(MockKernel::new(1), &address, config));
    add_follower(&mut daemons, 4);
    wait("the new node to be in", || {
        let view = daemons[2].kernel.view();
        view.is_some_and(|view| view.find_member(4).is_some())
    });
    drop(pause);
    daemons.insert(2, late);
    wait("all to be in", || is_view_of_all(&daemons, &[1, 2, 3, 4]));
    assert_eq!(identities(&daemons[1..3]), before[1..]);
    let secret = |identity: &Option<Identity>| identity.map(|identity| identity.secret);
    assert_eq!(secret(&daemons[3].kernel.identity()), secret(&before[0]));
}

#[test]
fn damaged_state_file_ends_the_seed_with_its_path() {
    let mut daemons = start_with_state_file("kited-damaged");
    let seed = daemons.remove(0);
    let config = seed.config();
    let file = config.state_file.clone().unwrap();
    seed.kill();
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[100] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let seed = TestDaemon::seed(MockKernel::new(1), "127.0.0.1:0", config);
    let error = format!("{:#}", seed.join().unwrap_err());
    assert!(
        error.contains("is damaged") && error.contains("kited-damaged"),
        "{error}"
    );
    std::fs::remove_file(file).unwrap();
}

#[test]
fn unwritable_state_file_ends_no_membership() {
    let mut daemons = start_with_state_file("kited-unwritable/seed");
    add_follower(&mut daemons, 4);
    wait("all to be in", || is_view_of_all(&daemons, &[1, 2, 3, 4]));
}

#[test]
fn paused_daemon_whose_kernel_replies_changes_no_view() {
    let daemons = start_cluster(2);
    let view = daemons[0].kernel.view();
    let paused = daemons[2].pause();
    // Three dead timeouts, so that a change would be visible.
    std::thread::sleep(3 * daemons[0].config().timing.dead_after);
    assert_eq!(daemons[0].kernel.view(), view);
    drop(paused);
    std::thread::sleep(daemons[0].config().timing.dead_after);
    assert!(is_view_of_all(&daemons, &[1, 2, 3]));
    assert_eq!(daemons[0].kernel.view(), view);
}

#[test]
fn paused_daemon_that_misses_a_view_is_unreachable_and_returns_in_its_incarnation() {
    let mut daemons = start_cluster(2);
    let before = identities(&daemons);
    let paused = daemons.pop().unwrap();
    let pause = paused.pause();
    daemons.pop().unwrap().stop(Shutdown::Leave).unwrap();
    wait("the paused to be unreachable", || {
        is_view_of_all(&daemons, &[1])
    });
    drop(pause);
    daemons.push(paused);
    wait("the paused to be back", || {
        is_view_of_all(&daemons, &[1, 3])
    });
    assert_eq!(daemons[1].kernel.identity(), before[2]);
}

#[test]
fn suspected_node_without_tcp_and_rdma_is_unreachable_early() {
    let mut daemons = start_cluster_with(2, ClusterConfig::without_dead_timeout());
    daemons.remove(2).kill();
    daemons[1].kernel.report_suspect(3);
    wait("the suspect to be unreachable", || {
        is_view_of_all(&daemons, &[1, 2])
    });
}

#[test]
fn node_with_slow_kernel_is_not_removed() {
    let mut daemons = start_cluster(1);
    let epoch = daemons[0].kernel.view().unwrap().epoch;
    let kernel = daemons[1].kernel.clone();
    let slow = kernel.block_apply();
    add_follower(&mut daemons, 3);
    // Longer than the dead timeout, so that a removal would be visible.
    std::thread::sleep(2 * daemons[0].config().timing.dead_after);
    drop(slow);
    wait("all to be in", || is_view_of_all(&daemons, &[1, 2, 3]));
    assert_eq!(
        daemons[0].kernel.view().unwrap().epoch,
        epoch + 4,
        "no other view was published"
    );
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
    let before: Vec<_> = daemons.iter().map(|d| d.kernel.identity()).collect();
    daemons
        .iter()
        .for_each(|daemon| daemon.kernel.fail_with_enomem(3));
    add_follower(&mut daemons, 3);
    wait("all to be in", || is_view_of_all(&daemons, &[1, 2, 3]));
    let now: Vec<_> = daemons[..2].iter().map(|d| d.kernel.identity()).collect();
    assert_eq!(now, before, "no incarnation changed");
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
