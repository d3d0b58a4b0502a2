// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Whole daemons on loopback, each with a thread, a runtime and a fake kernel of its own.

mod fake;

use std::io::{Read, Write};
use std::net::TcpStream;

use fake::{wait, Daemon, Kernel, Plan};
use kited::host::{Host, HostName};
use kited::key::Key;
use kited::node::Shutdown;
use kited::wire::{self, establish, Side};

/// A seed and `followers` others, all in one view.
fn cluster(followers: u8) -> Vec<Daemon> {
    cluster_of(followers, Plan::default())
}

fn cluster_of(followers: u8, plan: Plan) -> Vec<Daemon> {
    let mut daemons = vec![Daemon::seed(Kernel::new(1), "127.0.0.1:0", plan)];
    for id in 0..followers {
        follow(&mut daemons, id + 2);
        // One after the other, so that numbers are in order.
        wait("all to be in", || agree(&daemons, &numbers(daemons.len())));
    }
    daemons
}

/// Adds a follower whose kernel is `kernel`.
fn follow(daemons: &mut Vec<Daemon>, kernel: u8) {
    let (seed, plan) = (daemons[0].address(), daemons[0].plan());
    daemons.push(Daemon::follower(Kernel::new(kernel), &seed, plan));
}

fn numbers(count: usize) -> Vec<u32> {
    (1..).take(count).collect()
}

/// Whether the kernels of these daemons act on one view, of these members.
fn agree(daemons: &[Daemon], members: &[u32]) -> bool {
    let view = daemons[0].kernel.view();
    let found: Vec<u32> = view
        .iter()
        .flat_map(|v| &v.members)
        .map(|m| m.node)
        .collect();
    found == members && daemons.iter().all(|daemon| daemon.kernel.view() == view)
}

#[test]
fn nodes_join_and_say_that_they_are_ready() {
    let daemons = cluster(2);
    for (daemon, ready) in daemons.iter().zip([(1, 1), (2, 2), (3, 3)]) {
        wait("it to say so", || daemon.ready() == [ready]);
    }
    let secret = daemons[0].kernel.identity().map(|identity| identity.secret);
    assert!(daemons
        .iter()
        .all(|d| d.kernel.identity().map(|i| i.secret) == secret));
}

#[test]
fn all_are_told_where_the_others_are() {
    let daemons = cluster(2);
    let host = Host {
        ip: [127, 0, 0, 1].into(),
        name: HostName::own(),
    };
    let at = |node: u32| (node, host.clone());
    wait("all to be told", || {
        let told = |i: usize, hosts: &[_]| daemons[i].kernel.hosts() == hosts;
        let all = [at(1), at(2), at(3)];
        told(0, &all[1..]) && told(1, &all) && told(2, &all)
    });
}

#[test]
fn a_dead_node_is_removed_and_may_come_back() {
    let mut daemons = cluster(2);
    let dead = daemons.pop().unwrap();
    let former = dead.kernel.identity().unwrap();
    dead.kill();
    wait("the dead to be removed", || agree(&daemons, &[1, 2]));

    follow(&mut daemons, 3);
    wait("all to be in again", || agree(&daemons, &[1, 2, 3]));
    assert_ne!(
        daemons[2].kernel.identity().unwrap().incarnation,
        former.incarnation
    );
}

#[test]
fn a_node_that_is_stopped_leaves() {
    let mut daemons = cluster(2);
    let leaver = daemons.pop().unwrap();
    let kernel = leaver.kernel.clone();
    // Nothing is kept, so it does not matter that it may be a restart.
    leaver.stop(Shutdown::Detach).unwrap();
    assert_eq!(kernel.identity(), None, "its kernel is in no cluster");
    wait("the leaver to be removed", || agree(&daemons, &[1, 2]));
}

/// A seed and a follower whose sessions and checkpoints are kept while their daemons are restarted.
fn kept_pair() -> Vec<Daemon> {
    let seed = Daemon::seed(Kernel::kept(1), "127.0.0.1:0", Plan::default());
    let follower = Daemon::follower(Kernel::kept(2), &seed.address(), seed.plan());
    let daemons = vec![seed, follower];
    wait("all to be in", || agree(&daemons, &[1, 2]));
    daemons
}

/// Starts a daemon in place of the one at `at`, which has ended.
fn start_again(
    daemons: &mut Vec<Daemon>,
    at: usize,
    kernel: Kernel,
    (address, plan): (&str, Plan),
) {
    let daemon = match at {
        0 => Daemon::seed(kernel, address, plan),
        _ => Daemon::follower(kernel, address, plan),
    };
    daemons.insert(at, daemon);
    wait("it to be ready", || daemons[at].ready().len() == 1);
}

#[test]
fn a_daemon_that_is_restarted_goes_on_with_the_life_of_its_node() {
    let mut daemons = kept_pair();
    let seen = |daemons: &[Daemon]| -> Vec<_> {
        let kernels = daemons.iter().map(|daemon| &daemon.kernel);
        kernels
            .map(|kernel| (kernel.identity(), kernel.view()))
            .collect()
    };
    let before = seen(&daemons);
    for (at, is_killed) in [(1, true), (0, true), (1, false), (0, false)] {
        let ended = daemons.remove(at);
        let (kernel, address, plan) = (ended.kernel.clone(), ended.address(), ended.plan());
        match is_killed {
            true => ended.kill(),
            false => ended.stop(Shutdown::Detach).unwrap(),
        }
        start_again(&mut daemons, at, kernel, (&address, plan));
        assert_eq!(daemons[at].ready(), [(at as u32 + 1, 2)]);
        assert_eq!(seen(&daemons), before, "{at} {is_killed}");
    }
    // Both have found each other again, so that a third can join.
    follow(&mut daemons, 3);
    wait("all to be in", || agree(&daemons, &[1, 2, 3]));
    let lives = |seen: &[(_, _)]| seen.iter().map(|(life, _)| *life).collect::<Vec<_>>();
    assert_eq!(lives(&seen(&daemons[..2])), lives(&before));
}

#[test]
fn a_daemon_without_a_checkpoint_begins_a_new_life() {
    let mut daemons = kept_pair();
    let former = daemons[1].kernel.identity().unwrap();
    let ended = daemons.remove(1);
    let (kernel, address, plan) = (ended.kernel.clone(), ended.address(), ended.plan());
    ended.kill();
    start_again(&mut daemons, 1, kernel.without_memory(), (&address, plan));
    wait("it to be in again", || agree(&daemons, &[1, 2]));
    let now = daemons[1].kernel.identity().unwrap();
    assert_ne!(now.incarnation, former.incarnation);
}

#[test]
fn a_node_whose_operator_has_it_leave_leaves_although_its_session_is_kept() {
    let mut daemons = kept_pair();
    let leaver = daemons.pop().unwrap();
    let kernel = leaver.kernel.clone();
    leaver.stop(Shutdown::Leave).unwrap();
    assert_eq!(kernel.identity(), None, "its kernel is in no cluster");
    wait("the leaver to be removed", || agree(&daemons, &[1]));
}

#[test]
fn survivors_go_on_without_the_seed_and_take_it_back() {
    let mut daemons = cluster(2);
    let lives: Vec<_> = daemons[1..].iter().map(|d| d.kernel.identity()).collect();
    let seed = daemons.remove(0);
    let (address, plan) = (seed.address(), seed.plan());
    seed.kill();
    wait("the seed to be dropped", || agree(&daemons, &[2, 3]));

    daemons.insert(0, Daemon::seed(Kernel::new(1), &address, plan));
    wait("the seed to be back", || agree(&daemons, &[1, 2, 3]));
    assert_eq!(
        lives,
        daemons[1..]
            .iter()
            .map(|d| d.kernel.identity())
            .collect::<Vec<_>>()
    );
}

#[test]
fn a_paused_node_learns_that_it_is_out_and_joins_anew() {
    let daemons = cluster(2);
    let former = daemons[2].kernel.identity().unwrap();
    let paused = daemons[2].pause();
    wait("the paused to be removed", || agree(&daemons[..2], &[1, 2]));
    drop(paused);
    wait("the paused to be back", || agree(&daemons, &[1, 2, 3]));
    let now = daemons[2].kernel.identity().unwrap();
    assert_eq!(now.node, former.node);
    assert_ne!(now.incarnation, former.incarnation);
}

#[test]
fn a_suspect_that_is_dead_is_removed_early() {
    let daemons = cluster_of(2, Plan::patient());
    let paused = daemons[2].pause();
    daemons[1].kernel.suspect(3);
    wait("the suspect to be removed", || {
        agree(&daemons[..2], &[1, 2])
    });
    drop(paused);
}

#[test]
fn a_slow_kernel_does_not_look_dead() {
    let mut daemons = cluster(1);
    let epoch = daemons[0].kernel.view().unwrap().epoch;
    let kernel = daemons[1].kernel.clone();
    let slow = kernel.block();
    follow(&mut daemons, 3);
    // Longer than a node may be silent. That nothing happens takes time to see.
    std::thread::sleep(2 * daemons[0].plan().timing.dead);
    drop(slow);
    wait("all to be in", || agree(&daemons, &[1, 2, 3]));
    assert_eq!(
        daemons[0].kernel.view().unwrap().epoch,
        epoch + 2,
        "nobody was removed meanwhile"
    );
}

#[tokio::test]
async fn a_wrong_key_is_refused() {
    let daemons = cluster(0);
    let stream = tokio::net::TcpStream::connect(daemons[0].address());
    let key = Key::new(b"another");
    let refused = establish(stream.await.unwrap(), Side::Dialer, Some(&key)).await;
    assert!(matches!(refused, Err(wire::Error::WrongKey)));
    assert!(agree(&daemons, &[1]));
}

#[test]
fn a_node_without_a_key_is_told_that_it_needs_one() {
    let daemons = cluster(0);
    let keyless = Plan {
        key: None,
        ..daemons[0].plan()
    };
    let stranger = Daemon::follower(Kernel::new(9), &daemons[0].address(), keyless);
    let error = stranger.ended().unwrap_err();
    assert!(format!("{error:#}").contains("has a key"), "{error:#}");
    assert!(agree(&daemons, &[1]));
}

/// Whoever answers in the place of the seed can say these without a key.
#[test]
fn nobody_without_the_key_ends_a_daemon() {
    let address = fake::free_address();
    let impostor = fake::listen(&address);
    let follower = Daemon::follower(Kernel::new(2), &address, Plan::default());
    for answer in [
        &b"kited\0\x01\x00"[..],
        b"kited\0\x02\x01",
        b"kited\0\x01\x01\x00\x00",
    ] {
        let mut stream = fake::accept(&impostor);
        stream.write_all(answer).unwrap();
        // Until the follower has had enough of it.
        let _ = stream.read_to_end(&mut Vec::new());
    }
    drop(impostor);
    let seed = Daemon::seed(Kernel::new(1), &address, Plan::default());
    let daemons = [seed, follower];
    wait("all to be in", || agree(&daemons, &[1, 2]));
}

#[test]
fn strangers_who_say_nothing_keep_nobody_out() {
    let mut daemons = cluster_of(0, Plan::patient());
    let connect = |_| TcpStream::connect(daemons[0].address()).unwrap();
    let _strangers: Vec<TcpStream> = (0..200).map(connect).collect();
    follow(&mut daemons, 2);
    wait("the node to be in", || agree(&daemons, &[1, 2]));
}

#[test]
fn a_kernel_that_refuses_ends_the_daemon() {
    let daemons = cluster(0);
    let kernel = Kernel::new(2);
    kernel.refuse();
    let refused = Daemon::follower(kernel, &daemons[0].address(), daemons[0].plan());
    assert!(refused.ended().is_err());
    wait("it to be removed", || agree(&daemons, &[1]));
}

#[test]
fn a_kernel_without_memory_gets_the_view_later() {
    let mut daemons = cluster(1);
    let lives: Vec<_> = daemons.iter().map(|d| d.kernel.identity()).collect();
    daemons.iter().for_each(|daemon| daemon.kernel.starve(3));
    follow(&mut daemons, 3);
    wait("all to be in", || agree(&daemons, &[1, 2, 3]));
    let now: Vec<_> = daemons[..2].iter().map(|d| d.kernel.identity()).collect();
    assert_eq!(now, lives, "nobody gave up");
}

#[test]
fn a_seed_may_come_after_its_followers() {
    let address = fake::free_address();
    let early = fake::listen(&address);
    let follower = Daemon::follower(Kernel::new(2), &address, Plan::default());
    // The first connection ends at once; for the next there is no socket.
    drop(fake::accept(&early));
    drop(early);
    let seed = Daemon::seed(Kernel::new(1), &address, Plan::default());
    let daemons = [seed, follower];
    wait("all to be in", || agree(&daemons, &[1, 2]));
}
