// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Locks and barriers: exclusive and shared locks, barriers that release all participants or none, among threads of
//! all nodes, and despite lost packets, failed queue pairs, killed processes and dead nodes.

use std::time::Duration;

use kite_cluster::{outputs, until, Cluster, Node, Process, Result, Setup, SharedCluster, Turn};

static TRIO: SharedCluster = SharedCluster::new(|| Cluster::builder().name("locks").nodes(3));

const SOON: Duration = Duration::from_secs(60);
const LONG: Duration = Duration::from_secs(300);

fn setup() -> Setup {
    Setup {
        parameters: "default_timeout_ms=60000".into(),
        ..Setup::patient()
    }
}

fn trio() -> Result<Turn<'static>> {
    let trio = TRIO.take()?;
    trio.start_kite(&setup())?;
    Ok(trio)
}

fn first_word(node: &Node, name: &str) -> Result<u64> {
    let line = format!("atomics word {name} 0");
    Ok(node.workload(&line).sh()?.parse().unwrap())
}

/// Starts a process that acquires a lock, and waits until it has mapped the region.
fn start_lock(node: &Node, line: &str) -> Result<Process> {
    let mut process = node.workload(&format!("locks hold {line}")).spawn()?;
    process.read_until("mapped", SOON)?;
    Ok(process)
}

/// Starts a process as [`start_lock`] does, and waits until it queues for the lock.
fn queue_for_lock(node: &Node, line: &str) -> Result<Process> {
    let waits = || -> Result<u64> { Ok(node.stats()?["lock_waits"]) };
    let before = waits()?;
    let process = start_lock(node, line)?;
    until("the process to queue", SOON, || Ok(waits()? > before))?;
    Ok(process)
}

/// Waits until a process has its lock. Returns the line that it prints.
fn await_held(process: &mut Process) -> Result<String> {
    process.read_until("held", SOON)
}

/// Starts a process as [`start_lock`] does, and waits until it has the lock.
fn acquire_lock(node: &Node, line: &str) -> Result<Process> {
    let mut process = start_lock(node, line)?;
    assert_eq!(await_held(&mut process)?, "held");
    Ok(process)
}

fn unlock(process: &mut Process) -> Result<()> {
    process.signal("TERM")?;
    let output = process.wait(SOON)?;
    assert!(output.success(), "{output:#?}");
    Ok(())
}

/// Starts a process that arrives at a barrier.
fn arrive_at_barrier(node: &Node, line: &str) -> Result<Process> {
    let mut process = node
        .workload(&format!("locks wait-barrier {line}"))
        .spawn()?;
    process.read_until("mapped", SOON)?;
    Ok(process)
}

/// Tries to acquire a lock without waiting. Returns the line that the process prints, or its error.
fn attempt(node: &Node, line: &str) -> Result<String> {
    let mut process = start_lock(node, &format!("{line} --try"))?;
    match process.read_line(SOON)? {
        Some(held) => {
            unlock(&mut process)?;
            Ok(held)
        }
        None => Ok(process.wait(SOON)?.stderr),
    }
}

fn assert_fails(process: &mut Process, with: &str) -> Result<()> {
    let output = process.wait(SOON)?;
    assert!(!output.success(), "{output:#?}");
    assert!(output.stderr.contains(with), "{output:#?}");
    Ok(())
}

const TAKEN: &str = "the operation would have to wait";

#[test]
fn lock_is_exclusive_or_shared_across_nodes() -> Result<()> {
    let trio = trio()?;
    trio.node(1).kite("alloc tally 4096 --node 2")?;
    let line = "locks count tally --threads 4 --operations 40";
    outputs(&mut trio.everywhere(line)?, LONG)?;
    assert_eq!(first_word(trio.node(3), "tally")?, 2 * 3 * 4 * 30);
    trio.node(1).kite("free tally")?;
    Ok(())
}

/// A lost request, reply or grant is retried, and no lock gets two owners.
#[test]
#[ignore = "long"]
fn lock_is_granted_once_despite_lost_packets_and_failed_qps() -> Result<()> {
    let trio = trio()?;
    let (one, two) = (trio.node(1), trio.node(2));
    one.kite("alloc lossy 4096")?;
    trio.with_loss(5.0, || {
        let mut crowd = trio.everywhere("locks count lossy --threads 4 --operations 40")?;
        for _ in 0..2 {
            let before = two.stats()?["locks"];
            until("node 2 to have locks", SOON, || {
                Ok(two.stats()?["locks"] > before + 10)
            })?;
            trio.cut(2, SOON)?;
        }
        outputs(&mut crowd, LONG).map(drop)
    })?;
    assert_eq!(first_word(trio.node(3), "lossy")?, 2 * 3 * 4 * 30);
    assert_eq!(attempt(two, "lossy 0")?, "held");
    one.kite("free lossy")?;
    Ok(())
}

#[test]
fn lock_is_granted_in_fifo_order() -> Result<()> {
    let trio = trio()?;
    let (one, two, three) = (trio.node(1), trio.node(2), trio.node(3));
    two.kite("alloc line 4096 --other-rights rw")?;
    let mut first = acquire_lock(one, "line 7")?;
    let mut second = queue_for_lock(three, "line 7")?;
    let mut third = queue_for_lock(one, "line 7 --shared")?;
    let mut fourth = queue_for_lock(two, "line 7 --shared")?;
    let mut fifth = queue_for_lock(three, "line 7")?;
    // Other locks are free, and an attempt without waiting does not queue.
    assert_eq!(attempt(three, "line 8")?, "held");
    assert!(attempt(two, "line 7")?.contains(TAKEN));
    unlock(&mut first)?;
    assert_eq!(await_held(&mut second)?, "held");
    assert!(attempt(two, "line 7 --shared")?.contains(TAKEN));
    unlock(&mut second)?;
    assert_eq!(await_held(&mut third)?, "held");
    assert_eq!(await_held(&mut fourth)?, "held");
    // The lock is shared, but an exclusive waiter is first in the queue.
    assert!(attempt(two, "line 7 --shared")?.contains(TAKEN));
    unlock(&mut third)?;
    unlock(&mut fourth)?;
    assert_eq!(await_held(&mut fifth)?, "held");
    unlock(&mut fifth)?;
    two.kite("free line")?;
    Ok(())
}

#[test]
fn lock_waiter_that_times_out_leaves_the_queue() -> Result<()> {
    let trio = trio()?;
    let (one, two) = (trio.node(1), trio.node(2));
    one.kite("alloc late 4096")?;
    let mut first = acquire_lock(two, "late 0")?;
    for node in [one, two] {
        let mut late = start_lock(node, "late 0 --seconds 1")?;
        assert_fails(&mut late, "deadline passed")?;
    }
    let mut killed = queue_for_lock(two, "late 0")?;
    let mut last = queue_for_lock(one, "late 0")?;
    killed.kill()?;
    unlock(&mut first)?;
    assert_eq!(await_held(&mut last)?, "held");
    unlock(&mut last)?;
    one.kite("free late")?;
    Ok(())
}

#[test]
fn lock_of_a_dead_owner_passes_on_with_owner_died() -> Result<()> {
    let trio = trio()?;
    let (one, two, three) = (trio.node(1), trio.node(2), trio.node(3));
    one.kite("alloc robust 4096")?;
    for (holder, next) in [(one, two), (two, one), (two, three)] {
        let mut first = acquire_lock(holder, "robust 3")?;
        let mut second = queue_for_lock(next, "robust 3 --shared")?;
        let mut third = queue_for_lock(holder, "robust 3")?;
        first.kill()?;
        // A shared owner does not clear the state "owner died".
        assert_eq!(await_held(&mut second)?, "held, owner died");
        unlock(&mut second)?;
        assert_eq!(await_held(&mut third)?, "held, owner died");
        // An owner that dies in turn does not clear it either, even without a waiter.
        third.kill()?;
        until("the lock to be free", SOON, || {
            Ok(!attempt(next, "robust 3 --shared")?.contains(TAKEN))
        })?;
        assert_eq!(attempt(next, "robust 3")?, "held, owner died");
        assert_eq!(attempt(next, "robust 3")?, "held");
    }
    one.kite("free robust")?;
    Ok(())
}

#[test]
fn locks_and_waits_end_with_the_home_or_owner_node() -> Result<()> {
    let trio = trio()?;
    let (one, two, three) = (trio.node(1), trio.node(2), trio.node(3));
    one.kite("alloc here 4096")?;
    three.kite("alloc there 4096")?;
    let mut gone = acquire_lock(three, "here 0")?;
    let mut next = queue_for_lock(two, "here 0")?;
    let mut holder = acquire_lock(one, "there 0")?;
    let mut waiter = queue_for_lock(two, "there 0")?;
    let mut comer = arrive_at_barrier(two, "there 0 2")?;
    three.stop_kited()?;
    assert_eq!(await_held(&mut next)?, "held, owner died");
    assert_fails(&mut waiter, "is not in the cluster")?;
    assert_fails(&mut comer, "is not in the cluster")?;
    for holder in [&mut gone, &mut holder] {
        holder.signal("TERM")?;
        assert_fails(holder, "is not in the cluster")?;
    }
    unlock(&mut next)?;
    one.kite("free here")?;
    Ok(())
}

/// In its next incarnation a node numbers its requests from 1 again. Requests of the former one must not match them.
#[test]
fn lock_ends_with_the_incarnation_of_its_owner() -> Result<()> {
    let trio = trio()?;
    let (one, two) = (trio.node(1), trio.node(2));
    one.kite("alloc lives 4096")?;
    let mut before = acquire_lock(two, "lives 1")?;
    let mut shared = acquire_lock(two, "lives 2 --shared")?;
    two.stop_kited()?;
    one.await_view(1, 2)?;
    two.start_kite(2, &setup())?;
    one.await_view(1, 3)?;
    for old in [&mut before, &mut shared] {
        old.signal("TERM")?;
        assert_fails(old, "is not in the cluster")?;
    }
    let line = "locks count lives --threads 4 --operations 40";
    outputs(&mut [two.workload(line).spawn()?], LONG)?;
    assert_eq!(first_word(two, "lives")?, 4 * 30);
    let sums = outputs(
        &mut [two.workload("atomics fetch-add lives 8").spawn()?],
        LONG,
    )?;
    assert_eq!(sums, [(400 * 399 / 2).to_string()]);
    assert_eq!(attempt(one, "lives 1")?, "held, owner died");
    one.kite("free lives")?;
    Ok(())
}

#[test]
fn interrupted_lock_request_leaves_no_waiter() -> Result<()> {
    let trio = trio()?;
    let (one, two) = (trio.node(1), trio.node(2));
    one.kite("alloc signals 4096")?;
    for node in [one, two] {
        node.workload("locks wait-barrier signals 1 2 --interrupted 100")
            .sh()?;
    }
    one.kite("free signals")?;
    Ok(())
}

#[test]
fn free_ends_locks_of_the_region() -> Result<()> {
    let trio = trio()?;
    let (one, two) = (trio.node(1), trio.node(2));
    one.kite("alloc freed 4096")?;
    let mut holder = acquire_lock(two, "freed 0")?;
    let mut waiter = queue_for_lock(one, "freed 0")?;
    two.kite("free freed")?;
    assert_fails(&mut waiter, "was freed")?;
    holder.signal("TERM")?;
    assert_fails(&mut holder, "was freed")
}

#[test]
fn barrier_releases_all_participants_or_none() -> Result<()> {
    let trio = trio()?;
    for name in ["steps", "slippery"] {
        trio.node(1).kite(&format!("alloc {name} 4096 --node 3"))?;
    }
    let line = "locks pass-barrier steps --threads 3 --participants 18 --operations 25";
    outputs(&mut trio.everywhere(line)?, LONG)?;
    trio.node(2).loss(5.0)?;
    let line = "locks pass-barrier slippery --threads 3 --participants 18 --operations 25";
    let passed = outputs(&mut trio.everywhere(line)?, LONG);
    trio.node(2).loss(0.0)?;
    passed?;
    for name in ["steps", "slippery"] {
        trio.node(1).kite(&format!("free {name}"))?;
    }
    Ok(())
}

#[test]
#[ignore = "long"]
fn dead_or_timed_out_participant_does_not_count_at_barrier() -> Result<()> {
    let trio = trio()?;
    let (one, two, three) = (trio.node(1), trio.node(2), trio.node(3));
    one.kite("alloc gate 4096")?;
    let waits = || -> Result<u64> { Ok(two.stats()?["lock_waits"]) };
    let before = waits()?;
    let mut killed = arrive_at_barrier(two, "gate 5 2")?;
    until("the process to wait", SOON, || Ok(waits()? > before))?;
    let odd = three.workload("locks wait-barrier gate 5 3").run()?;
    assert!(odd.stderr.contains("invalid argument"), "{odd:#?}");
    killed.kill()?;
    // A different number of participants is rejected while another participant waits.
    until("the killed participant to be removed", SOON, || {
        let odd = three
            .workload("locks wait-barrier gate 5 3 --seconds 1")
            .run()?;
        Ok(odd.stderr.contains("deadline passed"))
    })?;
    let late = three
        .workload("locks wait-barrier gate 5 2 --seconds 3")
        .run()?;
    assert!(late.stderr.contains("deadline passed"), "{late:#?}");
    let mut crowd = [
        arrive_at_barrier(two, "gate 5 2")?,
        arrive_at_barrier(three, "gate 5 2")?,
    ];
    assert_eq!(outputs(&mut crowd, SOON)?, ["mapped\n1", "mapped\n1"]);
    one.kite("free gate")?;
    Ok(())
}

#[test]
fn lock_waiters_per_region_are_limited() -> Result<()> {
    let trio = trio()?;
    let one = trio.node(1);
    one.kite("alloc hoard 4096")?;
    let held = one.workload("locks exhaust hoard").limit(LONG).sh()?;
    assert_eq!(held, "65536");
    // All locks are in the state "owner died". Acquiring them makes room.
    let two = trio.node(2);
    until(
        "the locks of the ended process to be released",
        SOON,
        || Ok(!attempt(two, "hoard 5")?.contains(TAKEN)),
    )?;
    assert!(attempt(two, "hoard 70000")?.contains("held"));
    assert!(attempt(two, "hoard 6")?.contains("held, owner died"));
    one.kite("free hoard")?;
    Ok(())
}

#[test]
fn kernel_module_uses_locks_and_barriers() -> Result<()> {
    let trio = trio()?;
    let (one, two) = (trio.node(1), trio.node(2));
    two.kite("alloc module 4096")?;
    let load = "insmod /run/kite/build/user/kite_lock.ko region=module lock=9";
    one.sh(load)?;
    assert!(attempt(two, "module 9")?.contains(TAKEN));
    assert!(!one.run("rmmod kite")?.success());
    one.sh("rmmod kite_lock")?;
    assert_eq!(attempt(two, "module 9")?, "held");
    let mut comer = arrive_at_barrier(two, "module 9 2")?;
    one.sh(&format!("{load} count=2 keep=1"))?;
    assert_eq!(
        outputs(std::slice::from_mut(&mut comer), SOON)?,
        ["mapped\n1"]
    );
    let mut next = queue_for_lock(two, "module 9")?;
    one.sh("rmmod kite_lock")?;
    assert_eq!(await_held(&mut next)?, "held, owner died");
    unlock(&mut next)?;
    two.kite("free module")?;
    Ok(())
}

#[test]
fn invalid_lock_and_barrier_requests_are_rejected() -> Result<()> {
    let trio = trio()?;
    for node in [1, 2] {
        let checks = trio.node(node).workload("errors locks").sh()?;
        assert!(checks.ends_with(" checks"), "{checks}");
    }
    Ok(())
}
