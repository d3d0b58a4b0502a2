// SPDX-License-Identifier: GPL-2.0 OR MIT
//! What kite refuses, and with which errno.

use std::time::Duration;

use kite_cluster::{until, Cluster, Process, Result, Setup, SharedCluster, Turn};

static PAIR: SharedCluster = SharedCluster::new(|| Cluster::builder().name("errors").nodes(2));

const SOON: Duration = Duration::from_secs(30);

fn pair() -> Result<Turn<'static>> {
    let pair = PAIR.take()?;
    pair.start_kite(&Setup::default())?;
    Ok(pair)
}

/// A case of the test program's `errors`, on node 1; its failure lists all that was wrong.
fn case(user: &str, name: &str) -> Result<()> {
    case_on(&*pair()?, user, name)
}

fn case_on(pair: &Cluster, user: &str, name: &str) -> Result<()> {
    let line = format!("errors {name}");
    let checks = pair.node(1).workload(&line).user(user).sh()?;
    assert!(checks.ends_with(" checks"), "{checks}");
    Ok(())
}

#[test]
fn names_are_short_enough_unique_and_known() -> Result<()> {
    case("alice", "names")
}

#[test]
fn what_is_no_memory_of_the_process_is_not_registered() -> Result<()> {
    case("alice", "register")
}

#[test]
fn only_root_sets_policies_and_limits() -> Result<()> {
    case("alice", "qos")?;
    case("root", "qos")
}

#[test]
fn segments_are_all_checked_before_any_is_moved() -> Result<()> {
    case("alice", "vectors")
}

#[test]
fn a_handle_has_the_rights_it_was_mapped_with_and_no_others() -> Result<()> {
    case("alice", "rights")
}

#[test]
fn nothing_outside_a_region_is_reached() -> Result<()> {
    case("alice", "range")
}

#[test]
fn values_that_the_header_does_not_allow_are_refused() -> Result<()> {
    case("alice", "values")
}

#[test]
fn handles_belong_to_their_session_and_end_when_given_back() -> Result<()> {
    case("alice", "handles")
}

#[test]
fn an_unbound_session_can_do_nothing() -> Result<()> {
    case("alice", "unbound")
}

#[test]
fn a_session_is_bound_once_to_a_known_rnic_in_a_known_version() -> Result<()> {
    case("alice", "bind")
}

#[test]
fn requests_of_another_number_or_size_are_unknown() -> Result<()> {
    case("alice", "requests")
}

#[test]
fn pointers_to_nowhere_are_found_out() -> Result<()> {
    case("alice", "pointers")
}

#[test]
fn a_failed_request_writes_no_result() -> Result<()> {
    case("alice", "untouched")
}

#[test]
fn a_request_whose_result_cannot_be_written_leaves_nothing() -> Result<()> {
    let pair = pair()?;
    // The case looks at node 1. What it left lent by node 2 outlives its session if it has a name.
    let lent = || Ok(pair.node(2).stats()?["lent_bytes"]);
    let before = lent()?;
    case_on(&pair, "alice", "undelivered")?;
    assert_eq!(lent()?, before);
    Ok(())
}

#[test]
fn there_is_one_daemon_and_it_has_to_make_sense() -> Result<()> {
    case("root", "daemon")
}

#[test]
fn a_user_cannot_act_as_the_daemon() -> Result<()> {
    case("alice", "user")
}

#[test]
fn a_node_that_is_not_in_the_view_is_down() -> Result<()> {
    case("alice", "absent")
}

#[test]
fn node_zero_is_this_node() -> Result<()> {
    let pair = pair()?;
    let node = pair.node(2);
    assert_eq!(node.attempt("alice", "alloc 5000 --nodes 0")?, "OK");
    assert_eq!(node.attempt("alice", "list 0")?, "OK");
    Ok(())
}

#[test]
fn users_have_the_rights_that_the_owner_gives_them() -> Result<()> {
    let pair = pair()?;
    let attempt = |node: usize, user: &str, what: &str| pair.node(node).attempt(user, what);
    for (others, granted) in [
        ("-", ""),
        ("r", "r"),
        ("rw", "rw"),
        ("rwm", "rwm"),
        ("w", "w"),
    ] {
        let alloc = format!("alloc 5000 --name mine --nodes 2 --others {others}");
        assert_eq!(attempt(1, "alice", &alloc)?, "OK");
        for rights in ["r", "w", "m", "rw", "rwm"] {
            let may = rights.chars().all(|right| granted.contains(right));
            let want = if may { "OK" } else { "EACCES" };
            let got = attempt(2, "bob", &format!("map mine {rights}"))?;
            assert_eq!(got, want, "bob asks for {rights} and others have {others}");
        }
        assert_eq!(attempt(2, "alice", "map mine rwm")?, "OK", "the owner");
        assert_eq!(attempt(2, "root", "map mine rwm")?, "OK", "root");
        assert_eq!(attempt(1, "alice", "free mine")?, "OK");
    }
    Ok(())
}

#[test]
fn rights_that_cannot_be_granted_are_refused() -> Result<()> {
    case("alice", "grants")
}

/// Starts a program of bob's on node 2, and waits until it says this.
fn bob(pair: &Cluster, line: &str, says: &str) -> Result<Process> {
    let mut process = pair.node(2).workload(line).user("bob").spawn()?;
    process.read_until(says, SOON)?;
    Ok(process)
}

fn assert_denied(process: &mut Process) -> Result<()> {
    let output = process.wait(SOON)?;
    let said = format!("{}{}", output.stdout, output.stderr);
    let denied = said.contains("EACCES") || said.contains("permission denied");
    assert!(denied, "{output:#?}");
    Ok(())
}

/// Whichever node has the memory, and whichever the region.
#[test]
fn who_loses_a_right_loses_what_was_mapped_with_it() -> Result<()> {
    let pair = pair()?;
    let uid = pair.node(2).sh("id -u bob")?;
    for (home, granter) in [(1, 2), (2, 2)] {
        let on = |node: usize, user: &str, line: &str| {
            let line = format!("/kite/target/release/kite {line}");
            pair.node(node).command(line).user(user).sh().map(drop)
        };
        let alice = |line: &str| on(granter, "alice", line);
        let may = |rights: &str| pair.node(2).attempt("bob", &format!("map ours {rights}"));
        on(home, "alice", "alloc ours 600000 --node 1")?;
        assert_eq!(may("r")?, "EACCES");
        alice(&format!("grant ours rw --user {uid}"))?;
        alice("grant ours r")?;
        assert_eq!(
            (may("rw")?.as_str(), may("rwm")?.as_str()),
            ("OK", "EACCES")
        );
        let mut writer = bob(&pair, "hold ours --size 4096", "ops")?;
        let mut reader = bob(&pair, "hold ours --size 4096 --read-only", "ops")?;
        let mut watcher = bob(&pair, "watch ours --expect EACCES", "watching")?;
        let mut holder = bob(&pair, "locks hold ours 1", "held")?;
        let mut waiter = bob(&pair, "locks hold ours 1", "mapped")?;
        alice(&format!("grant ours r --user {uid}"))?;
        assert_denied(&mut writer)?;
        assert_denied(&mut waiter)?;
        holder.signal("TERM")?;
        assert_denied(&mut holder)?;
        assert_eq!((may("r")?.as_str(), may("w")?.as_str()), ("OK", "EACCES"));
        // They go on by what they still may.
        assert!(reader.is_running() && watcher.is_running());
        alice(&format!("grant ours - --user {uid}"))?;
        assert_denied(&mut reader)?;
        assert!(watcher.wait(SOON)?.success());
        assert_eq!(may("r")?, "EACCES", "others may");
        alice(&format!("grant ours rwm --user {uid}"))?;
        let mut copier = bob(&pair, "copies endless ours ours", "copying")?;
        // A master may give up what he has.
        on(2, "bob", &format!("grant ours rm --user {uid}"))?;
        assert_denied(&mut copier)?;
        assert_eq!(pair.node(2).attempt("bob", "free ours")?, "OK");
    }
    Ok(())
}

#[test]
fn who_is_not_in_the_group_cannot_open_the_device() -> Result<()> {
    let pair = pair()?;
    assert_eq!(pair.node(1).attempt("mallory", "open")?, "EACCES");
    assert_eq!(pair.node(1).attempt("bob", "open")?, "OK");
    Ok(())
}

#[test]
fn who_has_a_region_mapped_hears_that_another_node_freed_it() -> Result<()> {
    let pair = pair()?;
    for (home, freer) in [(1, 2), (2, 1), (2, 2)] {
        pair.node(home)
            .kite("alloc doomed 9000 --node 1 --other-rights rwm")?;
        let mut watch = pair.node(1).workload("watch doomed").spawn()?;
        watch.read_until("watching", SOON)?;
        pair.node(freer).kite("free doomed")?;
        let output = watch.wait(SOON)?;
        assert!(output.success(), "home {home}, freer {freer}: {output:#?}");
    }
    Ok(())
}

#[test]
fn a_node_without_a_daemon_reaches_no_other() -> Result<()> {
    let pair = pair()?;
    pair.node(2).stop_kited()?;
    let checks = pair.node(2).workload("errors outside").user("alice").sh()?;
    assert!(checks.ends_with(" checks"), "{checks}");
    Ok(())
}

#[test]
fn views_have_to_make_sense() -> Result<()> {
    let pair = pair()?;
    pair.node(2).stop_kited()?;
    let checks = pair.node(2).workload("errors views").sh()?;
    assert!(checks.ends_with(" checks"), "{checks}");
    Ok(())
}

/// Nobody is removed before a deadline: who is suspected has two heartbeats to answer.
fn patient_pair() -> Result<Turn<'static>> {
    let pair = PAIR.take()?;
    pair.start_kite(&Setup {
        heartbeat_ms: 20_000,
        dead_ms: 120_000,
        ..Setup::default()
    })?;
    Ok(pair)
}

#[test]
fn a_peer_that_does_not_answer_is_waited_for_until_the_deadline() -> Result<()> {
    let pair = patient_pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    one.kite("alloc far 9000 --node 2")?;
    let mut hold = one
        .workload("hold far --size 4096 --timeout-ms 2000")
        .spawn()?;
    hold.read_until("ops", SOON)?;
    two.pause()?;
    let error = hold.read_until("error", SOON);
    let again = one.attempt("root", "write far --timeout-ms 1500");
    let listed = one.attempt("root", "list 2");
    let interrupted = one.workload("errors interrupted").sh();
    two.resume()?;
    let error = error?;
    assert!(error.starts_with("error ETIMEDOUT after "), "{error}");
    let ms: u64 = error.split(' ').nth(3).unwrap().parse().unwrap();
    assert!((1900..10_000).contains(&ms), "{error}");
    assert_eq!(
        (again?.as_str(), listed?.as_str()),
        ("ETIMEDOUT", "ETIMEDOUT")
    );
    interrupted?;
    let works = || Ok(one.attempt("root", "write far")? == "OK");
    until("the paused node to be back", SOON, works)?;
    one.kite("free far")?;
    Ok(())
}

#[test]
fn signals_do_not_prolong_a_deadline() -> Result<()> {
    let pair = patient_pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    one.kite("alloc far 9000 --node 2")?;
    two.pause()?;
    let write = one
        .workload("attempt write far --timeout-ms 1500 --signal-ms 10")
        .limit(SOON)
        .sh();
    two.resume()?;
    assert_eq!(write?, "ETIMEDOUT");
    let works = || Ok(one.attempt("root", "write far")? == "OK");
    until("the paused node to be back", SOON, works)?;
    one.kite("free far")?;
    Ok(())
}
