// SPDX-License-Identifier: GPL-2.0 OR MIT
//! What the scripts say and refuse before they come to any machine.

use std::fs;
use std::process::Command;

const TOP: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

const TMP: &str = env!("CARGO_TARGET_TMPDIR");

/// Whether a line of bash succeeds in the checkout, and all that it says.
fn bash(line: &str) -> (bool, String) {
    let line = format!("exec 2>&1; {line}");
    let mut bash = Command::new("bash");
    let output = bash
        .args(["-euc", &line])
        .current_dir(TOP)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    (output.status.success(), said)
}

#[test]
fn a_name_of_nothing_is_refused_and_the_known_ones_are_named() {
    for (line, known) in [
        ("scripts/check clipy", "clippy-kernel"),
        ("scripts/check shell clipy", "clippy-kernel"),
        ("scripts/test faulst", "faults"),
    ] {
        let (success, said) = bash(line);
        assert!(!success && said.contains(known), "{line}: {said}");
    }
}

/// What is proposed when a stage's log ends with this line.
fn remedy(line: &str) -> String {
    let log = format!("{TMP}/stage.log");
    fs::write(&log, format!("{line}\n")).unwrap();
    bash(&format!(". scripts/stages.sh; remedy {log}")).1
}

#[test]
fn an_archive_that_was_not_reached_is_told_from_other_failures() {
    for line in [
        "E: Failed getting release file http://deb.debian.org/debian/dists/trixie/Release",
        "E: Couldn't download packages: apt base-files",
        "Err:1 http://deb.debian.org/debian trixie InRelease",
        "  Temporary failure resolving 'deb.debian.org'",
        "  Could not resolve 'proxy.example'",
        "  Could not connect to 127.0.0.1:9 (127.0.0.1). - connect (111: Connection refused)",
        "E: Failed to fetch http://deb.debian.org/debian/x.deb  Connection timed out",
        "E: Unable to fetch some archives, maybe run apt-get update or try with --fix-missing?",
        "W: Failed to fetch http://deb.debian.org/debian/x  Could not resolve 'deb.debian.org'",
        "wget: unable to resolve host address 'deb.debian.org'",
        "Connecting to deb.debian.org|127.0.0.1|:80... failed: Connection refused.",
    ] {
        assert!(remedy(line).contains("was not reached"), "{line}");
    }
    for line in [
        "I: Resolving dependencies of required packages...",
        "  systemd-homed systemd-userdbd systemd-boot systemd-resolved systemd-repart",
        "Creating user 'systemd-network' (systemd Network Management) with UID 998 and GID 998.",
        "  DESCEND bpf/resolve_btfids",
        "  CC      net/ipv4/inet_connection_sock.o",
    ] {
        assert!(remedy(line).contains("resumes at this stage"), "{line}");
    }
}

#[test]
fn a_command_waits_for_a_set_up_that_is_under_way() {
    let (success, said) = bash(&format!(
        "export KITE_CACHE={TMP}/cache; rm -rf $KITE_CACHE; mkdir $KITE_CACHE; cd {TMP}
        exec 9>>$KITE_CACHE/lock; flock 9
        {TOP}/scripts/in-root true 2>said 9>&- & in_root=$!
        until grep waiting said; do kill -0 $in_root; sleep 0.05; done
        flock -u 9
        ! wait $in_root
        grep 'not built' said"
    ));
    assert!(success, "{said}");
}
