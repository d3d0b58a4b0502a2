// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `kite init` and `kite join` as a shell runs them, in mount namespaces with an empty `/etc` and `/run`. Needs root.

use std::process::Command;

/// Runs a script, in which `kite` is the command, and returns all that it prints.
fn run(script: &str) -> String {
    let script = format!(
        "exec 2>&1
        mount -t tmpfs none /etc
        mount -t tmpfs none /run
        kite() {{ {} \"$@\"; }}
        fails() {{ if \"$@\"; then echo \"succeeds: $*\"; exit 1; fi; }}
        {script}",
        env!("CARGO_BIN_EXE_kite")
    );
    let mut unshare = Command::new("unshare");
    let output = unshare.args(["--mount", "bash", "-euc", &script]).output();
    let output = output.unwrap();
    let output_text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{output_text}");
    output_text
}

#[test]
fn init_without_systemd_writes_files_once_and_prints_the_start_command() {
    let output_text = run("
        kite init --listen 10.0.0.1
        [ \"$(stat -c '%a %s' /etc/kite/key)\" = '600 32' ]
        cp /etc/kite/key /run/key
        kite init --listen 10.0.0.1:7471
        cmp /etc/kite/key /run/key
        fails kite init --listen 10.0.0.2
        fails kite join 10.0.0.2
        grep KITED_OPTIONS /etc/kite/kited.env
        ls -A /etc/kite");
    for line in [
        "start the daemon with: kited --listen 10.0.0.1:7471 --key /etc/kite/key\n",
        "ssh root@NODE kite join 10.0.0.1:7471 --key-file - </etc/kite/key\n",
        "other options of kited are in /etc/kite/kited.env",
        "KITED_OPTIONS=--listen 10.0.0.1:7471 --key /etc/kite/key\nkey\nkited.env\n",
    ] {
        assert!(output_text.contains(line), "{line}: {output_text}");
    }
}

#[test]
fn join_reads_key_from_stdin_or_file_and_failed_join_writes_no_file() {
    let output_text = run("
        head -c 32 /dev/urandom >/run/key
        head -c 32 /dev/urandom >/run/other
        fails kite join seed
        fails kite join seed --key-file - </dev/null
        fails kite join seed --key-file /run/missing
        fails kite join 'seed --insecure' --key-file /run/key
        [ ! -e /etc/kite ]
        kite join seed --key-file - </run/key
        kite join seed:7471 --key-file /run/key
        kite join seed
        fails kite join seed --key-file /run/other
        cmp /etc/kite/key /run/key");
    let options = "kited --join seed:7471 --key /etc/kite/key\n";
    assert_eq!(output_text.matches(options).count(), 3, "{output_text}");
    assert!(
        output_text.contains("another key is in /etc/kite/key"),
        "{output_text}"
    );
}

#[test]
fn init_and_join_with_a_store_write_its_options() {
    let output_text = run("
        tls='--store-ca /etc/ca --store-cert /etc/c --store-key /etc/k'
        fails kite init --store etcds://a:1 --store-ca ca
        fails kite init --store etcd://a:1 --listen 10.0.0.1
        fails kite join seed --store etcd://a:1
        [ ! -e /etc/kite ]
        kite init --store etcds://a:1,b:1/x $tls
        kite join --store etcds://a:1,b:1/x $tls
        fails kite join --store etcd://a:1");
    let options =
        "--store etcds://a:1,b:1/x --store-ca /etc/ca --store-cert /etc/c --store-key /etc/k";
    for line in [
        format!("start the daemon with: kited {options} --key /etc/kite/key\n"),
        format!("ssh root@NODE kite join {options} --key-file - </etc/kite/key\n"),
    ] {
        assert!(output_text.contains(&line), "{line}: {output_text}");
    }
}

#[test]
fn init_with_failing_service_reports_it_and_can_be_repeated() {
    let output_text = run("
        mkdir -p /run/systemd/system /run/bin
        printf '#!/bin/sh\\nexit 1\\n' >/run/bin/systemctl
        chmod +x /run/bin/systemctl
        PATH=/run/bin:$PATH
        fails kite init
        fails kite init
        cat /etc/kite/kited.env");
    let failed = "systemctl enable --quiet kited.service failed";
    assert_eq!(output_text.matches(failed).count(), 2, "{output_text}");
    assert!(
        output_text.contains("KITED_OPTIONS=--listen 0.0.0.0:7471"),
        "{output_text}"
    );
}
