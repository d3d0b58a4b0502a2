// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Restarts of daemons, and the state that they save.

use std::thread;

use kited::node::Shutdown;

use crate::mock::{self, wait, ClusterConfig, MockKernel, TestDaemon};
use crate::{add_follower, identities, is_reachable_in_all, is_view_of_all, start_cluster_with};

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
    let first = |seen: &[(_, _)]| {
        seen.iter()
            .map(|(identity, _)| *identity)
            .collect::<Vec<_>>()
    };
    assert_eq!(first(&state_of(&daemons[..2])), first(&before));
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
fn seed_with_state_file_keeps_all_incarnations_although_a_new_node_arrives_first() {
    let directory = mock::temporary_directory("newcomer");
    let config = ClusterConfig::with_state(directory.join("state"));
    let mut daemons = start_cluster_with(2, config);
    let before = identities(&daemons[1..]);
    let locks: Vec<_> = daemons[1..].iter().map(TestDaemon::pause_lock).collect();
    let pauses: Vec<_> = daemons[1..]
        .iter()
        .zip(&locks)
        .map(|(daemon, lock)| daemon.pause_on(lock))
        .collect();
    let seed = daemons.remove(0);
    let (address, config) = (seed.address(), seed.config());
    seed.kill();
    daemons.insert(0, TestDaemon::seed(MockKernel::new(1), &address, config));
    add_follower(&mut daemons, 9);
    wait("the newcomer to join", || {
        daemons[3]
            .kernel
            .identity()
            .is_some_and(|identity| identity.node == 4)
    });
    drop(pauses);
    wait("all to be in", || {
        is_reachable_in_all(&daemons, &[1, 2, 3, 4])
    });
    assert_eq!(identities(&daemons[1..3]), before);
    drop(daemons);
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn damaged_state_file_ends_the_seed_with_its_name() {
    let directory = mock::temporary_directory("damaged");
    let file = directory.join("state");
    std::fs::write(&file, "damaged").unwrap();
    let config = ClusterConfig::with_state(file.clone());
    let seed = TestDaemon::seed(MockKernel::new(1), "127.0.0.1:0", config);
    let error = format!("{:#}", seed.join().unwrap_err());
    assert!(
        error.contains(&*file.to_string_lossy()) && error.contains("delete it"),
        "{error}"
    );
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn full_disk_of_the_seed_delays_joins_and_ends_no_incarnation() {
    let directory = mock::temporary_directory("full");
    let file = directory.join("state");
    let mut daemons = start_cluster_with(1, ClusterConfig::with_state(file));
    let before = identities(&daemons);
    // Writes to this device fail with ENOSPC.
    let full = directory.join("state.new");
    std::os::unix::fs::symlink("/dev/full", &full).unwrap();
    let (seed, config) = (daemons[0].address(), daemons[0].config());
    daemons.push(TestDaemon::follower(MockKernel::new(3), &seed, config));
    thread::sleep(3 * daemons[0].config().timing.dead_after);
    assert_eq!(
        daemons[2].kernel.identity(),
        None,
        "its number is not saved"
    );
    assert!(is_reachable_in_all(&daemons[..2], &[1, 2]));
    std::fs::remove_file(full).unwrap();
    wait("all to be in", || is_reachable_in_all(&daemons, &[1, 2, 3]));
    assert_eq!(identities(&daemons[..2]), before);
    drop(daemons);
    std::fs::remove_dir_all(directory).unwrap();
}
