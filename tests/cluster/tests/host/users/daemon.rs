// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The daemon under a service manager, and the commands that change the membership.

use std::time::Duration;

use kite_cluster::{Error, Result, Setup};

use crate::{pair, SOON};

#[test]
fn daemon_notifies_the_service_manager_when_ready_and_stopping() -> Result<()> {
    let pair = pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    two.stop_kited()?;
    one.stop_kited()?;
    let mut notices = two.workload("notices /tmp/notify").spawn()?;
    notices.read_until("listening", SOON)?;
    let mut daemon = two.spawn(
        "NOTIFY_SOCKET=/tmp/notify exec /kite/target/release/kited --join 10.77.0.1:7700 \
         --insecure --heartbeat-interval-ms 500 --dead-timeout-ms 4000",
    )?;
    let early = notices.read_line(Duration::from_secs(5));
    assert!(matches!(early, Err(Error::Timeout { .. })), "{early:?}");
    assert_eq!(two.attempt("alice", "alloc 1")?, "EHOSTUNREACH");

    one.start_kite(1, &Setup::default())?;
    assert_eq!(notices.read_line(SOON)?.as_deref(), Some("READY=1"));
    assert_eq!(two.attempt("alice", "alloc 1 --nodes 1")?, "OK");
    assert_eq!(notices.read_line(SOON)?.as_deref(), Some("STATUS=node 2"));
    daemon.signal("TERM")?;
    assert_eq!(notices.read_line(SOON)?.as_deref(), Some("STOPPING=1"));
    assert!(daemon.wait(SOON)?.success());
    Ok(())
}

#[test]
fn init_join_and_leave_change_the_membership() -> Result<()> {
    let pair = pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    for node in pair.nodes() {
        node.stop_kited()?;
        node.sh("cp -a /etc /run/etc && mount --bind /run/etc /etc && \
             systemd-sysusers /kite/debian/kite-tools.sysusers && \
             mkdir -p /run/systemd/system /tmp/bin && \
             ln -sf /kite/tests/cluster/guest/systemctl /tmp/bin/systemctl")?;
    }
    let kite = "PATH=/tmp/bin:$PATH /kite/target/release/kite";
    let stdout = one.sh(&format!("{kite} init --listen 10.77.0.1"))?;
    assert!(stdout.starts_with("node 1 of 1\n"), "{stdout}");
    let (_, join) = stdout.split_once("root@NODE kite ").expect(&stdout);
    let join = join.strip_suffix(" </etc/kite/key").expect(join);
    let key = one.sh("base64 /etc/kite/key")?;
    let stdout = two.sh(&format!("echo {key} | base64 -d | {kite} {join}"))?;
    assert_eq!(stdout, "node 2 of 2");
    one.await_view(1, 2)?;
    for node in [one, two] {
        // CAP_NET_ADMIN has number 12.
        let status = node.sh("stat -c %U /proc/$(pgrep -x kited) && \
             sed -nE 's/^Cap(Eff|Bnd|Amb):.0+//p' /proc/$(pgrep -x kited)/status")?;
        assert_eq!(status, "_kited\n1000\n1000\n1000");
    }
    for (node, stdout) in [(two, "node 2 left"), (one, "node 1 left")] {
        let left = node.sh(&format!("{kite} leave --yes"))?;
        assert!(left.starts_with(stdout), "{left}");
        node.sh("umount -l /etc; rm -r /run/etc /run/kite-* /run/systemd/system /tmp/bin")?;
    }
    Ok(())
}
