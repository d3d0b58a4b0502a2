// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Requests that kite rejects, and their errnos.

use std::time::Duration;

use kite_cluster::{until, Cluster, Process, Result, Setup, SharedCluster, Turn};

static PAIR: SharedCluster = SharedCluster::new(|| Cluster::builder().name("errors").nodes(2));

const SOON: Duration = Duration::from_secs(30);

fn pair() -> Result<Turn<'static>> {
    let pair = PAIR.take()?;
    pair.start_kite(&Setup::default())?;
    Ok(pair)
}

/// Runs a case of the test program's `errors` on node 1, whose failure lists all violations.
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
fn invalid_duplicate_and_unknown_names_are_rejected() -> Result<()> {
    case("alice", "names")
}

/// The RDMA core hides the RNICs of other network namespaces only if the administrator wants so.
#[test]
fn process_outside_the_network_namespace_of_the_rnic_cannot_use_it() -> Result<()> {
    let pair = pair()?;
    let one = pair.node(1);
    let kite = "/kite/target/release/kite";
    one.sh(&format!("unshare --net {kite} nodes"))?;
    one.sh("rdma system set netns exclusive")?;
    let inside = one.kite("nodes");
    let nodes = one.run(&format!("unshare --net {kite} nodes"));
    let named = one.run(&format!(
        "unshare --net {kite} --rnic {} nodes",
        one.rnic()?
    ));
    one.sh("rdma system set netns shared")?;
    inside?;
    for output in [nodes?, named?] {
        assert!(output.stderr.contains("no such RNIC"), "{output:?}");
    }
    Ok(())
}

#[test]
fn register_of_unmapped_memory_fails() -> Result<()> {
    case("alice", "register")
}

#[test]
fn policies_and_limits_require_root() -> Result<()> {
    case("alice", "qos")?;
    case("root", "qos")
}

#[test]
fn invalid_segment_fails_before_any_byte_moves() -> Result<()> {
    case("alice", "vectors")
}

#[test]
fn handle_allows_only_the_rights_of_its_mapping() -> Result<()> {
    case("alice", "rights")
}

#[test]
fn access_beyond_the_region_is_rejected() -> Result<()> {
    case("alice", "range")
}

#[test]
fn invalid_argument_values_are_rejected() -> Result<()> {
    case("alice", "values")
}

#[test]
fn handles_are_per_session_and_invalid_after_unmap() -> Result<()> {
    case("alice", "handles")
}

#[test]
fn unbound_session_fails_with_enotconn() -> Result<()> {
    case("alice", "unbound")
}

#[test]
fn bind_checks_version_rnic_and_repetition() -> Result<()> {
    case("alice", "bind")
}

#[test]
fn unknown_ioctl_numbers_and_sizes_fail_with_enotty() -> Result<()> {
    case("alice", "requests")
}

#[test]
fn invalid_pointers_fail_with_efault() -> Result<()> {
    case("alice", "pointers")
}

#[test]
fn failed_request_leaves_the_argument_unchanged() -> Result<()> {
    case("alice", "untouched")
}

#[test]
fn request_with_unwritable_result_creates_no_object() -> Result<()> {
    let pair = pair()?;
    // The case checks node 1. Memory that node 2 lends to a named region outlives the session.
    let lent = || Ok(pair.node(2).stats()?["lent_bytes"]);
    let before = lent()?;
    case_on(&pair, "alice", "undelivered")?;
    assert_eq!(lent()?, before);
    Ok(())
}

#[test]
fn join_accepts_one_daemon_with_valid_arguments() -> Result<()> {
    case("root", "daemon")
}

#[test]
fn join_and_set_view_require_root() -> Result<()> {
    case("alice", "user")
}

#[test]
fn node_outside_the_view_fails_with_ehostdown() -> Result<()> {
    case("alice", "absent")
}

#[test]
fn node_number_zero_is_this_node() -> Result<()> {
    let pair = pair()?;
    let node = pair.node(2);
    assert_eq!(node.attempt("alice", "alloc 5000 --nodes 0")?, "OK");
    assert_eq!(node.attempt("alice", "list 0")?, "OK");
    Ok(())
}

#[test]
fn granted_rights_apply_to_each_user() -> Result<()> {
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
fn invalid_grants_are_rejected() -> Result<()> {
    case("alice", "grants")
}

/// Starts a program as bob on node 2, and waits until it prints `says`.
fn bob(pair: &Cluster, line: &str, says: &str) -> Result<Process> {
    let mut process = pair.node(2).workload(line).user("bob").spawn()?;
    process.read_until(says, SOON)?;
    Ok(process)
}

fn assert_denied(process: &mut Process) -> Result<()> {
    let output = process.wait(SOON)?;
    let stdout = format!("{}{}", output.stdout, output.stderr);
    let denied = stdout.contains("EACCES") || stdout.contains("permission denied");
    assert!(denied, "{output:#?}");
    Ok(())
}

/// Regions with memory and home on each node.
#[test]
fn revoked_right_ends_the_mappings_that_used_it() -> Result<()> {
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
        let mut writer = bob(&pair, "transfer ours --size 4096", "ops")?;
        let mut reader = bob(&pair, "transfer ours --size 4096 --read-only", "ops")?;
        let mut watcher = bob(&pair, "watch ours --expect EACCES", "watching")?;
        let mut holder = bob(&pair, "locks hold ours 1", "held")?;
        let mut waiter = bob(&pair, "locks hold ours 1", "mapped")?;
        alice(&format!("grant ours r --user {uid}"))?;
        assert_denied(&mut writer)?;
        assert_denied(&mut waiter)?;
        holder.signal("TERM")?;
        assert_denied(&mut holder)?;
        assert_eq!((may("r")?.as_str(), may("w")?.as_str()), ("OK", "EACCES"));
        // They continue with the rights that they have left.
        assert!(reader.is_running() && watcher.is_running());
        alice(&format!("grant ours - --user {uid}"))?;
        assert_denied(&mut reader)?;
        assert!(watcher.wait(SOON)?.success());
        assert_eq!(may("r")?, "EACCES", "others may");
        alice(&format!("grant ours rwm --user {uid}"))?;
        let mut copier = bob(&pair, "copies endless ours ours", "copying")?;
        // A master may revoke its own rights.
        on(2, "bob", &format!("grant ours rm --user {uid}"))?;
        assert_denied(&mut copier)?;
        assert_eq!(pair.node(2).attempt("bob", "free ours")?, "OK");
    }
    Ok(())
}

#[test]
fn root_without_capabilities_has_the_rights_of_nobody() -> Result<()> {
    let pair = pair()?;
    let node = pair.node(1);
    let run = |how: &str, line: &str| node.sh(&format!("{how} /kite/target/release/{line}"));
    assert_eq!(node.attempt("alice", "alloc 5000 --name hers")?, "OK");
    let no_capability = "setpriv --bounding-set=-sys_admin --inh-caps=-sys_admin";
    for (how, name) in [
        (no_capability, "capless"),
        ("unshare --user --map-root-user", "boxed"),
    ] {
        let attempt = |what: &str| run(how, &format!("kite-workload attempt {what}"));
        assert_eq!(attempt("map hers r")?, "EACCES", "{how}");
        assert_eq!(attempt(&format!("alloc 5000 --name {name}"))?, "OK");
        let listing = node.kite("regions --numeric")?;
        let row = listing.lines().find(|row| row.starts_with(name));
        let row = row.unwrap_or_else(|| panic!("not listed: {listing}"));
        assert!(row.split_whitespace().any(|cell| cell == "65534"), "{row}");
        assert_eq!(attempt(&format!("free {name}"))?, "OK");
    }
    assert_eq!(node.attempt("root", "free hers")?, "OK");
    Ok(())
}

/// In the namespace of bob, the number of alice names bob. No other user has a number.
#[test]
fn uids_are_those_of_the_user_namespace() -> Result<()> {
    let pair = pair()?;
    let node = pair.node(1);
    let [alice, bob] = ["alice", "bob"].map(|user| node.sh(&format!("id -u {user}")));
    let (alice, bob) = (alice?, bob?);
    let run_in_namespace = |program: &str| {
        let line = format!("unshare --user --map-user={alice} /kite/target/release/{program}");
        node.command(line).user("bob").sh()
    };
    let in_namespace = |line: &str| run_in_namespace(&format!("kite {line}"));
    let owner_row = |listing: &str, name: &str, owner: &str| {
        let row = listing.lines().find(|row| row.starts_with(name));
        let row = row.unwrap_or_else(|| panic!("not listed: {listing}"));
        assert!(row.split_whitespace().any(|cell| cell == owner), "{row}");
    };
    assert_eq!(node.attempt("alice", "alloc 5000 --name outer")?, "OK");
    in_namespace("alloc inner 5000")?;
    let listing = in_namespace("regions --numeric")?;
    owner_row(&listing, "inner", &alice);
    owner_row(&listing, "outer", "65534");
    owner_row(&node.kite("regions --numeric")?, "inner", &bob);
    // The first is the owner, to which no right can be granted. The others are not mapped.
    for uid in [&*alice, &*bob, "0", "4242"] {
        let granted = in_namespace(&format!("grant inner r --user {uid}"));
        assert!(granted.is_err(), "user {uid}");
    }
    assert_eq!(node.attempt("alice", "map inner r")?, "EACCES");
    run_in_namespace("kite-workload errors names")?;
    for (user, name) in [("alice", "outer"), ("bob", "inner")] {
        assert_eq!(node.attempt(user, &format!("free {name}"))?, "OK");
    }
    Ok(())
}

#[test]
fn user_outside_the_group_cannot_open_the_device() -> Result<()> {
    let pair = pair()?;
    assert_eq!(pair.node(1).attempt("mallory", "open")?, "EACCES");
    assert_eq!(pair.node(1).attempt("bob", "open")?, "OK");
    Ok(())
}

#[test]
fn mapped_region_reports_its_free_by_another_node() -> Result<()> {
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
fn node_without_daemon_fails_with_ehostunreach() -> Result<()> {
    let pair = pair()?;
    pair.node(2).stop_kited()?;
    let checks = pair.node(2).workload("errors outside").user("alice").sh()?;
    assert!(checks.ends_with(" checks"), "{checks}");
    Ok(())
}

#[test]
fn invalid_views_are_rejected() -> Result<()> {
    let pair = pair()?;
    pair.node(2).stop_kited()?;
    let checks = pair.node(2).workload("errors views").sh()?;
    assert!(checks.ends_with(" checks"), "{checks}");
    Ok(())
}

/// Returns nodes of which none is removed before a deadline: a suspected node has two heartbeats to respond.
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
fn unresponsive_peer_fails_at_the_deadline() -> Result<()> {
    let pair = patient_pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    one.kite("alloc far 9000 --node 2")?;
    let mut hold = one
        .workload("transfer far --size 4096 --timeout-ms 2000")
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
    until("the resumed node to respond", SOON, works)?;
    one.kite("free far")?;
    Ok(())
}

#[test]
fn signals_do_not_extend_a_deadline() -> Result<()> {
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
    until("the resumed node to respond", SOON, works)?;
    one.kite("free far")?;
    Ok(())
}
