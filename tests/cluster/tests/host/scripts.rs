// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Output and errors of the scripts before they use a machine.

use std::fs;
use std::process::Command;

const TOP: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

const TMP: &str = env!("CARGO_TARGET_TMPDIR");

/// Runs a line of bash in the checkout. Returns whether it succeeds, and its output.
fn bash(line: &str) -> (bool, String) {
    let line = format!("exec 2>&1; {line}");
    let mut bash = Command::new("bash");
    let output = bash
        .args(["-euc", &line])
        .current_dir(TOP)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    (output.status.success(), text)
}

#[test]
fn unknown_step_name_is_rejected_with_the_known_names() {
    for (line, known) in [
        ("scripts/check clipy", "clippy-kernel"),
        ("scripts/check shell clipy", "clippy-kernel"),
        ("scripts/test faulst", "faults"),
    ] {
        let (success, output) = bash(line);
        assert!(!success && output.contains(known), "{line}: {output}");
    }
}

/// Returns the proposed remedy if the log of a stage ends with this line.
fn remedy(line: &str) -> String {
    let log = format!("{TMP}/stage.log");
    fs::write(&log, format!("{line}\n")).unwrap();
    bash(&format!(". scripts/setup.d/stages.sh; remedy {log}")).1
}

#[test]
fn unreachable_archive_is_distinguished_from_other_failures() {
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
        assert!(remedy(line).contains("cannot be reached"), "{line}");
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

/// Runs `functions` of scripts/setup.d/series.sh on the package names of an archive that apt reads, with a package of
/// kernel headers for each version.
fn on_archive(name: &str, versions: &[&str], functions: &str) -> String {
    let dir = format!("{TMP}/archive-{name}");
    let stanza = |version: &&str| {
        format!("Package: linux-headers-{version}+deb13-amd64\nVersion: 1\nArchitecture: amd64\nFilename: x\nSize: 1\n\n")
    };
    let index: String = versions.iter().map(stanza).collect();
    fs::create_dir_all(format!("{dir}/lists/partial")).unwrap();
    fs::write(format!("{dir}/Packages"), index).unwrap();
    fs::write(
        format!("{dir}/sources.list"),
        format!("deb [trusted=yes] file:{dir} ./\n"),
    )
    .unwrap();
    let (success, output) = bash(&format!(
        "apt=(-o Dir::Etc::SourceList={dir}/sources.list -o Dir::Etc::SourceParts=- -o Dir::State::Lists={dir}/lists
            -o Dir::Cache={dir} -o Dir::State::Status=/dev/null -o Debug::NoLocking=true -o APT::Sandbox::User=root)
        . scripts/setup.d/series.sh
        apt-get -qq ${{apt[@]}} update
        names=$(apt-cache ${{apt[@]}} pkgnames linux-headers-)
        {functions}"
    ));
    assert!(success, "{output}");
    output.trim().into()
}

#[test]
fn kernel_series_is_the_newest_tested_one_that_the_archive_offers() {
    let select = "select_series 7.3 7.2 <<<\"$names\"";
    for (name, versions, selected) in [
        ("both", &["7.2.12", "7.3.4"][..], "7.3 7.2"),
        ("newer", &["7.3.4"], "7.3"),
        ("older", &["7.2.9", "7.2.12"], "7.2"),
        ("untested", &["7.4.1", "7.30.1", "6.12.3"], ""),
    ] {
        assert_eq!(on_archive(name, versions, select), selected, "{name}");
    }
}

#[test]
fn kernel_version_is_the_newest_of_its_series() {
    let versions = ["7.3.9", "7.3.10", "7.2.12", "7.4.1"];
    let newest = "offered_versions 7.3 <<<\"$names\" | tail -n 1";
    assert_eq!(on_archive("versions", &versions, newest), "7.3.10");
}

#[test]
fn command_waits_for_a_running_setup() {
    let (success, output) = bash(&format!(
        "export KITE_CACHE={TMP}/cache; rm -rf $KITE_CACHE; mkdir $KITE_CACHE; cd {TMP}
        exec 9>>$KITE_CACHE/lock; flock 9
        {TOP}/scripts/in-root true 2>errors 9>&- & in_root=$!
        until grep waiting errors; do kill -0 $in_root; sleep 0.05; done
        flock -u 9
        if wait $in_root; then exit 1; fi
        grep 'not built' errors"
    ));
    assert!(success, "{output}");
}

/// Returns the error of the set-up on an empty cache that these lines of bash prepare and run.
fn refused(name: &str, prepare: &str, wrapper: &str) -> String {
    let (success, output) = bash(&format!(
        "cd {TMP}; rm -rf {name}; mkdir -p {name}/cache; cd {name}; export KITE_CACHE=$PWD/cache
        {prepare}
        {wrapper} {TOP}/scripts/setup"
    ));
    assert!(!success, "{output}");
    output
}

/// Returns a wrapper in which the cache is a tmpfs.
fn on_tmpfs(options: &str) -> String {
    format!(
        "unshare --mount -- bash -euc 'mount -t tmpfs -o {options} none cache; exec \"$@\"' bash"
    )
}

#[test]
fn setup_without_permission_or_space_reports_a_remedy() {
    let user = refused("user", "", "setpriv --reuid=alice --clear-groups");
    assert!(user.contains("needs root"), "{user}");
    assert!(user.contains("sudo make"), "{user}");
    let confined = refused("confined", "", "setpriv --bounding-set=-sys_admin");
    assert!(confined.contains("may not mount"), "{confined}");
    assert!(confined.contains("all privileges"), "{confined}");
    let read_only = refused("read-only", "", &on_tmpfs("ro"));
    assert!(read_only.contains("cannot be written"), "{read_only}");
    assert!(read_only.contains("Set KITE_CACHE"), "{read_only}");
    let full = refused("full", "", &on_tmpfs("size=64m"));
    assert!(full.contains("64 MiB free, and 10240 MiB"), "{full}");
    assert!(full.contains("Free some space"), "{full}");
}

#[test]
fn setup_without_debootstrap_or_archive_reports_the_lack() {
    let bare = "mkdir bin; ln -sf /usr/bin/* /usr/sbin/* bin/; PATH=$PWD/bin
        rm -f bin/apt-get bin/debootstrap";
    let output = refused("bare", bare, "");
    assert!(output.contains("debootstrap is not installed"), "{output}");
    assert!(output.contains("package manager"), "{output}");
    let offline = format!(
        "{bare}
        echo 'echo E: Failed getting release file; exit 1' >bin/debootstrap
        chmod +x bin/debootstrap"
    );
    let output = refused("offline", &offline, "");
    assert!(output.contains("'base' failed"), "{output}");
    assert!(output.contains("cannot be reached"), "{output}");
}

#[test]
fn interrupted_setup_resumes_at_its_stage() {
    let set_up = r#". scripts/setup.d/stages.sh
        stage_first() { echo first >>$KITE_CACHE/ran; }
        stage_second() {
            echo second >>$KITE_CACHE/ran
            [ -e $KITE_CACHE/enough ] && return
            sleep 1000 & echo $! >$KITE_CACHE/child; wait
        }
        each_stage() { $1 first 1 "the first"; $1 second 1 "the second"; }
        trap interrupted INT TERM HUP
        each_stage stage"#;
    let (success, output) = bash(&format!(
        r#"rm -rf {TMP}/resume; mkdir {TMP}/resume; export KITE_CACHE={TMP}/resume
        bash -euc '{set_up}' &
        until [ -s $KITE_CACHE/child ]; do kill -0 $!; sleep 0.05; done
        kill -TERM $!
        if wait $!; then exit 1; fi
        child=/proc/$(cat $KITE_CACHE/child)/status
        if [ -e $child ] && ! grep -q '^State:.Z' $child; then exit 1; fi
        touch $KITE_CACHE/enough
        bash -euc '{set_up}'
        bash -euc '{set_up}'
        [ "$(xargs <$KITE_CACHE/ran)" = "first second second" ]"#
    ));
    assert!(success, "{output}");
    assert!(
        output.contains("resumes at the interrupted stage"),
        "{output}"
    );
}

#[test]
fn documents_agree_with_headers_and_their_samples_compile() {
    for check in ["manuals", "samples"] {
        let (success, output) = bash(&format!("python3 scripts/lint/{check}.py"));
        assert!(success, "{check}: {output}");
    }
}
