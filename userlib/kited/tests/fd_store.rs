// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The command `kited` under a service manager with a file descriptor store, on a host without `/dev/kite`.

use std::os::unix::net::UnixDatagram;
use std::process::Command;
use std::time::Duration;

/// Runs kited until it exits, with a stored descriptor of this name that the shell passes. Returns the notifications
/// that kited sent. Their descriptors are closed.
fn run_and_collect_notifications(name: &str) -> Vec<String> {
    let path = std::env::temp_dir().join(format!("kited-notify-{}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let socket = UnixDatagram::bind(&path).unwrap();
    let mut kited = Command::new("sh")
        .args(["-c", "exec 3</dev/null; LISTEN_PID=$$ exec \"$0\" \"$@\""])
        .arg(env!("CARGO_BIN_EXE_kited"))
        .args(["--join", "127.0.0.1:1", "--insecure", "--rnic", "missing"])
        .envs([("FDSTORE", "2"), ("LISTEN_FDS", "1")])
        .env("LISTEN_FDNAMES", name)
        .env("NOTIFY_SOCKET", &path)
        .spawn()
        .unwrap();
    socket
        .set_read_timeout(Some(Duration::from_secs(30)))
        .unwrap();
    let mut received: Vec<String> = Vec::new();
    while received.last().is_none_or(|last| last != "STOPPING=1\n") {
        let mut text = [0; 4096];
        let len = socket.recv(&mut text).unwrap();
        received.push(String::from_utf8_lossy(&text[..len]).into_owned());
    }
    assert!(!kited.wait().unwrap().success(), "there is no device");
    std::fs::remove_file(&path).unwrap();
    received
}

#[test]
fn session_without_checkpoint_is_removed_from_the_store_before_join() {
    let received = run_and_collect_notifications("rxe0-0000000000000001");
    assert_eq!(
        received,
        [
            "FDSTORE=1\nFDNAME=checkpoint\n",
            "FDSTOREREMOVE=1\nFDNAME=rxe0-0000000000000001\n",
            "BARRIER=1\n",
            "STOPPING=1\n",
        ]
    );
}
