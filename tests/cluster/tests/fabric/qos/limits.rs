// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Limits of users and cgroups: requests and bytes that they count.

use kite_cluster::Result;

use crate::{json, pair, parse_requests, requests, used, LONG, SOON};

/// Kinds of requests, and how many requests the limit counts for one of each.
const KINDS: [(&str, u64); 9] = [
    ("read", 1),
    ("write", 1),
    ("vectored", 2),
    ("fill", 1),
    ("copy", 1),
    ("fetch-add", 1),
    ("lock", 1),
    ("queue-write", 1),
    ("queue-add", 1),
];

#[test]
#[ignore = "long"]
fn limit_applies_to_every_kind_of_request() -> Result<()> {
    let pair = pair()?;
    let one = pair.node(1);
    for (kind, counted) in KINDS {
        one.kite("limit --user $(id -u alice) --requests 100")?;
        let output = requests(one, "alice", &format!("{kind} shared --count 60"))?;
        let (count, ms, error) = parse_requests(&output);
        assert_eq!((count, error.as_str()), (60, ""), "{kind}");
        // The first request passes at once, and a burst of 10 ms is allowed.
        let least = (60 * counted - 2) * 10 - 10;
        assert!(ms >= least, "{kind}: {ms} ms, at least {least}");
        let used = used(one)?;
        assert_eq!(used["requests"], 60 * counted, "{kind}: {used}");
        assert_ne!(used["throttled"], 0, "{kind}");
        one.kite("limit --user $(id -u alice) --remove")?;
    }
    one.kite("free shared")?;
    Ok(())
}

#[test]
fn limit_applies_to_messages_and_their_bytes() -> Result<()> {
    let pair = pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    one.kite("free shared")?;
    let mut server = two.workload("rpc serve shared --data-max 200000").spawn()?;
    server.read_until("serving", SOON)?;
    for (kind, len) in [("send", 1000), ("send", 100_000), ("queue-send", 1000)] {
        one.kite(&format!(
            "limit --user $(id -u alice) --bytes {}",
            100 * len
        ))?;
        let output = requests(
            one,
            "alice",
            &format!("{kind} shared --count 40 --len {len}"),
        )?;
        let (count, ms, error) = parse_requests(&output);
        assert_eq!((count, error.as_str()), (40, ""), "{kind} of {len}");
        assert!(ms >= 370, "{kind} of {len}: {ms} ms");
        let used = used(one)?;
        assert_eq!(used["bytes"], 40 * len, "{kind} of {len}: {used}");
        one.kite("limit --user $(id -u alice) --remove")?;
    }
    server.kill()?;
    Ok(())
}

#[test]
fn limit_applies_within_one_request() -> Result<()> {
    let pair = pair()?;
    let one = pair.node(1);
    one.kite("limit --user $(id -u alice) --bytes 16M")?;
    let write = format!("write shared --count 1 --len {}", 8 << 20);
    let (count, ms, error) = parse_requests(&requests(one, "alice", &write)?);
    assert_eq!((count, error.as_str()), (1, ""));
    // The last part passes at once, and a burst is allowed.
    assert!(ms >= 400, "{ms} ms");
    assert_eq!(used(one)?["bytes"], 8 << 20);
    one.kite("limit --user $(id -u alice) --remove")?;
    one.kite("free shared")?;
    Ok(())
}

/// A rejected request is not counted, and delays no others.
#[test]
fn rejected_request_is_not_charged() -> Result<()> {
    let pair = pair()?;
    let one = pair.node(1);
    one.kite("limit --user $(id -u alice) --bytes 100M")?;
    for (len, count) in [(u64::MAX, 30), (u64::MAX / 2 + 1, 2), ((64 << 20) + 1, 1)] {
        let line = format!("queue-fill shared --len {len} --count {count}");
        assert_eq!(
            parse_requests(&requests(one, "alice", &line)?).2,
            "OutOfRange",
            "{len}"
        );
    }
    assert_eq!(used(one)?["bytes"], 0);
    let output = requests(one, "alice", "queue-fill shared --len 1000 --count 50")?;
    assert_eq!(parse_requests(&output).2, "", "{output}");
    assert_eq!(used(one)?["bytes"], 50_000);
    one.kite("limit --user $(id -u alice) --remove")?;
    one.kite("free shared")?;
    Ok(())
}

#[test]
fn cgroup_limit_includes_descendants() -> Result<()> {
    let pair = pair()?;
    let one = pair.node(1);
    one.sh("mkdir -p /sys/fs/cgroup/batch/inner")?;
    one.kite("limit --cgroup /sys/fs/cgroup/batch --requests 100")?;
    let within = |cgroup: &str| {
        let line = format!(
            "echo $$ >/sys/fs/cgroup/{cgroup}/cgroup.procs; \
             exec /kite/target/release/kite-workload requests write shared --count 20"
        );
        one.command(line).limit(LONG).sh()
    };
    for (cgroup, requests) in [("batch", 20), ("batch/inner", 40), ("", 40)] {
        let output = within(cgroup)?;
        let (count, ms, error) = parse_requests(&output);
        assert_eq!((count, error.as_str()), (20, ""), "{cgroup}");
        assert!(cgroup.is_empty() || ms >= 170, "{cgroup}: {ms} ms");
        assert_eq!(used(one)?["requests"], requests, "{cgroup}");
    }
    one.kite("limit --cgroup /sys/fs/cgroup/batch --remove")?;
    one.sh("rmdir /sys/fs/cgroup/batch/inner /sys/fs/cgroup/batch")?;
    one.kite("free shared")?;
    Ok(())
}

#[test]
fn limits_and_policies_require_the_administrator() -> Result<()> {
    let pair = pair()?;
    let one = pair.node(1);
    for line in ["qos --policy none", "limit --user 7 --requests 1"] {
        let line = format!("/kite/target/release/kite {line} 2>&1");
        let output = one.command(line).user("alice").run()?;
        assert!(!output.success(), "{output:#?}");
        assert!(output.stdout.contains("administrator"), "{output:#?}");
    }
    assert_eq!(json(one, "qos")?["policy"], "sw");
    assert_eq!(json(one, "limit")?, serde_json::json!([]));
    one.kite("free shared")?;
    Ok(())
}
