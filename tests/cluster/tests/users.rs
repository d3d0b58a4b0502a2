// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The steps of README.md for users of kite: installation, samples, and the daemon under a service manager.

use std::fs;
use std::process::Command;
use std::sync::LazyLock;
use std::time::Duration;

use kite_cluster::{
    outputs, until, Cluster, Error, Node, Process, Result, Setup, SharedCluster, Turn,
};

static PAIR: SharedCluster = SharedCluster::new(|| Cluster::builder().name("users").nodes(2));

/// Where kite is installed, as a package would be before it is packed.
static INSTALLED: LazyLock<&str> = LazyLock::new(|| {
    let place = "/kite/target/install";
    host(&format!(
        "rm -rf {place} && make -s -C /kite install DESTDIR={place}"
    ));
    place
});

const README: &str = include_str!("../../../README.md");

const SOON: Duration = Duration::from_secs(30);

fn pair() -> Result<Turn<'static>> {
    let pair = PAIR.take()?;
    pair.start_kite(&Setup::default())?;
    Ok(pair)
}

/// Runs a command on this host, where everything is built, and returns its output.
fn host(line: &str) -> String {
    let line = format!("exec 2>&1; {line}");
    let output = Command::new("sh").args(["-euc", &line]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{line}: {said}");
    said
}

/// Returns the text between two texts of README.md.
fn readme(from: &str, to: &str) -> &'static str {
    let (_, rest) = README.split_once(from).expect(from);
    rest.split_once(to).expect(to).0
}

/// Builds a C program with what is installed; `how` is "" or "--static".
fn compile(how: &str, name: &str, source: &str) -> String {
    let place = *INSTALLED;
    let program = format!("{place}/{name}");
    fs::write(format!("{program}.c"), source).unwrap();
    host(&format!(
        "export PKG_CONFIG_SYSROOT_DIR={place}
        export PKG_CONFIG_LIBDIR={place}/usr/local/lib/pkgconfig
        flags=$(pkg-config {how} --cflags --libs libkite)
        cc {how} -Wall -Wextra -Werror -o {program} {program}.c $flags"
    ));
    program
}

/// A line in which what is installed is found.
fn installed(line: &str) -> String {
    let place = format!("{}/usr/local", *INSTALLED);
    format!("set -e; export PATH={place}/bin:$PATH LD_LIBRARY_PATH={place}/lib; {line}")
}

/// Runs such a line as an ordinary user.
fn run_installed(node: &Node, line: &str) -> Result<String> {
    node.command(installed(line)).user("alice").sh()
}

#[test]
fn installation_is_complete_and_uses_its_prefix() {
    let place = *INSTALLED;
    let files = host(&format!("cd {place}/usr && find . ! -type d"));
    for file in [
        "bin/kite",
        "sbin/kited",
        "include/kite/kite.h",
        "include/kite/krcore.h",
        "include/kite/lite.h",
        "lib/libkite.a",
        "lib/libkite.so",
        "lib/kite/libkite_verbs.so",
        "lib/systemd/system/kited.service",
        "lib/udev/rules.d/99-kite.rules",
        "share/man/man1/kite-put.1",
        "share/man/man3/LT_malloc.3",
        "share/man/man3/LT_free.3",
        "share/man/man4/kite.4",
        "share/man/man7/kite-verbs.7",
        "share/man/man8/kited.8",
        "share/bash-completion/completions/kite",
    ] {
        assert!(files.contains(&format!("./local/{file}\n")), "{file}");
    }
    assert!(files.contains("/updates/kite.ko\n"), "{files}");
    host(&format!(
        "! grep -rE '@[A-Z]+@' {place}/usr/local/lib --include=*.pc --include=*.service"
    ));
}

#[test]
fn installed_kite_run_finds_the_library() {
    let place = *INSTALLED;
    let said = host(&format!("{place}/usr/local/bin/kite run -v true"));
    let library = format!("LD_PRELOAD={place}/usr/local/lib/kite/libkite_verbs.so");
    assert!(said.contains(&library), "{said}");
}

#[test]
fn systemd_verifies_the_unit() {
    // In a mount namespace the installed files can be at the paths in the unit.
    let faults = host(&format!(
        "unshare --mount sh -euc '
            mount --bind {}/usr/local /usr/local
            systemd-analyze verify --man=no kited.service'",
        *INSTALLED
    ));
    assert_eq!(faults, "");
}

#[test]
fn shell_sample_returns_the_file() -> Result<()> {
    let pair = pair()?;
    let sample: Vec<&str> = readme("**Shell**", "**Rust**")
        .lines()
        .filter_map(|line| line.strip_prefix("    "))
        .collect();
    let lines = sample.join("\n");
    let said = run_installed(
        pair.node(1),
        &format!("head -c 100000 /dev/urandom >results.tar\n{lines}\ncmp results.tar copy.tar"),
    )?;
    assert!(sample.len() >= 4 && said.contains("results"), "{said}");
    Ok(())
}

#[test]
fn interrupted_put_leaves_no_region() -> Result<()> {
    let pair = pair()?;
    let node = pair.node(1);
    // Takes many seconds to copy where packets are lost, and milliseconds to see.
    node.sh("truncate -s 128M /tmp/large")?;
    node.loss(10.0)?;
    let mut put = node.spawn("exec /kite/target/release/kite put /tmp/large large --node 2")?;
    let named = || Ok(node.kite("regions")?.contains("large"));
    until("the region to have its name", SOON, named)?;
    put.signal("INT")?;
    let output = put.wait(SOON);
    node.loss(0.0)?;
    let output = output?;
    assert!(output.stderr.contains("interrupted"), "{output:#?}");
    assert_eq!(node.attempt("root", "map large r")?, "ENOENT");
    Ok(())
}

#[test]
fn interrupted_or_failed_get_leaves_no_file() -> Result<()> {
    let pair = pair()?;
    let node = pair.node(1);
    // Takes seconds to copy, and milliseconds to see.
    node.kite("alloc vast 300M --node 2")?;
    node.sh("mkdir /tmp/got; echo before >/tmp/got/file")?;
    let begin = |file: &str| -> Result<Process> {
        let get = node.spawn(&format!(
            "exec /kite/target/release/kite get vast /tmp/got/{file}"
        ))?;
        let begun = || Ok(node.sh("ls /tmp/got")?.contains("partial"));
        until("the copy to begin", SOON, begun)?;
        Ok(get)
    };
    let ended = |mut get: Process, why: &str| -> Result<()> {
        let output = get.wait(SOON)?;
        assert!(
            !output.success() && output.stderr.contains(why),
            "{output:#?}"
        );
        assert_eq!(node.sh("ls /tmp/got; cat /tmp/got/file")?, "file\nbefore");
        Ok(())
    };
    for (signal, file) in [("INT", "new"), ("TERM", "file")] {
        let get = begin(file)?;
        get.signal(signal)?;
        ended(get, "interrupted")?;
    }
    let get = begin("file")?;
    node.kite("free vast")?;
    ended(get, "freed")?;
    node.sh("rm -r /tmp/got").map(drop)
}

#[test]
fn get_to_a_device_or_link_keeps_its_type() -> Result<()> {
    let pair = pair()?;
    let node = pair.node(1);
    node.sh("set -e; PATH=/kite/target/release:$PATH; cd /tmp
        head -c 100000 /dev/urandom >given; kite put given small --node 2
        kite get small /dev/null; [ -c /dev/null ]
        kite get small /dev/fd/1 | cmp given
        kite get small /dev/fd/1 >taken; cmp given taken
        cat given | kite put - piped --node 2; kite get piped - | cmp given
        kite get piped - 2>said | head -c 1 >/dev/null; [ ! -s said ]; rm said; kite free piped
        if kite put - empty </dev/null; then exit 1; fi
        ln -s taken link; : >taken
        kite get small link; cmp given taken; [ -L link ]
        mkfifo pipe; kite get small pipe & cmp given pipe; wait; [ -p pipe ]
        kite free small; rm given taken link pipe")
        .map(drop)
}

#[test]
fn rust_sample_reads_the_written_data() -> Result<()> {
    let pair = pair()?;
    pair.node(1).workload("readme").user("alice").sh()?;
    Ok(())
}

#[test]
fn c_samples_run() -> Result<()> {
    let sample = readme("```c\n", "\n```");
    let sample = format!(
        "#include <kite/kite.h>\n#include <kite/lite.h>\n\
         int main(void)\n{{\n{sample}\nreturn own != 1 || err;\n}}\n"
    );
    let sample = compile("", "sample", &sample);
    let hello = include_str!("../../../userlib/examples/hello.c");
    let hello = compile("--static", "hello", hello);
    let atomics = include_str!("../../../userlib/examples/atomics.c");
    let atomics = compile("", "atomics", atomics);
    let pair = pair()?;
    run_installed(pair.node(1), &sample)?;
    let said = run_installed(pair.node(1), &format!("{hello} 2"))?;
    assert_eq!(said, "node 1 wrote to node 2 and read back: hello");
    let said = run_installed(pair.node(1), &format!("{atomics} 2"))?;
    assert_eq!(said, "was 0, then 5");
    Ok(())
}

#[test]
fn copy_samples_print_their_lines() -> Result<()> {
    let c = include_str!("../../../userlib/examples/copies.c");
    let c = compile("", "copies", c);
    let rust = "/kite/target/release/examples/copies";
    host("cd /kite && cargo build -q --release -p kite --example copies");
    let pair = pair()?;
    for (program, node) in [(c.as_str(), 1), (&c, 2), (rust, 2)] {
        let said = run_installed(pair.node(1), &format!("{program} {node}"))?;
        assert_eq!(said, ">-".repeat(10));
    }
    Ok(())
}

#[test]
fn krcore_sample_counts() -> Result<()> {
    let c = include_str!("../../../userlib/examples/krcore.c");
    let c = compile("", "krcore", c);
    let pair = pair()?;
    let counts = |node| run_installed(pair.node(node), &format!("{c} 2"));
    let mut serves = pair.node(2).command(installed(&c)).user("alice").spawn()?;
    serves.read_until("bound", Duration::from_secs(30))?;
    for before in 0..3 {
        assert_eq!(counts(1)?, format!("previous value: {before}"));
    }
    Ok(())
}

#[test]
fn krcore_functions_work_as_documented() -> Result<()> {
    let c = compile("", "krcore-all", include_str!("../guest/krcore.c"));
    let pair = pair()?;
    let mut lends = pair.node(2).command(installed(&c)).user("alice").spawn()?;
    lends.read_until("bound", Duration::from_secs(30))?;
    let said = run_installed(pair.node(1), &format!("{c} 2"))?;
    assert_eq!(said, "all is well");
    let ended = lends.wait(Duration::from_secs(30))?;
    assert!(ended.success(), "{ended:?}");
    Ok(())
}

#[test]
fn migration_samples_continue_to_count() -> Result<()> {
    let c = include_str!("../../../userlib/examples/moves.c");
    let c = compile("", "moves", c);
    let rust = "/kite/target/release/examples/moves";
    host("cd /kite && cargo build -q --release -p kite --example moves");
    let pair = pair()?;
    for program in [c.as_str(), rust] {
        let said = run_installed(pair.node(1), &format!("{program} 2"))?;
        assert_eq!(said, "counted to 1000");
    }
    Ok(())
}

#[test]
fn grant_samples_grant_and_revoke() -> Result<()> {
    let c = include_str!("../../../userlib/examples/grants.c");
    let c = compile("", "grants", c);
    let rust = "/kite/target/release/examples/grants";
    host("cd /kite && cargo build -q --release -p kite --example grants");
    let pair = pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    for program in [c.as_str(), rust] {
        one.sh("rm -f /tmp/enough")?;
        let program = installed(&format!("{program} $(id -u bob)"));
        let input = "until [ -e /tmp/enough ]; do sleep 0.1; done";
        let line = format!("{input} | {{ {program}; }}");
        let mut owner = one.command(line).user("alice").spawn()?;
        owner.read_until("may read", SOON)?;
        assert_eq!(two.attempt("bob", "map board r")?, "OK");
        assert_eq!(two.attempt("bob", "map board w")?, "EACCES");
        one.sh("touch /tmp/enough")?;
        let output = owner.wait(SOON)?;
        assert!(output.stdout.ends_with("no more\n"), "{output:#?}");
        assert_eq!(two.attempt("bob", "map board r")?, "ENOENT");
    }
    Ok(())
}

#[test]
fn vector_samples_write_columns() -> Result<()> {
    let c = include_str!("../../../userlib/examples/vectors.c");
    let c = compile("", "vectors", c);
    let rust = "/kite/target/release/examples/vectors";
    host("cd /kite && cargo build -q --release -p kite --example vectors");
    let pair = pair()?;
    for (program, node) in [(c.as_str(), 1), (&c, 2), (rust, 2)] {
        let said = run_installed(pair.node(1), &format!("{program} {node}"))?;
        assert_eq!(said, "gold        Au\nsilver      Ag\ncopper      Cu");
    }
    Ok(())
}

#[test]
fn vote_samples_count_in_registered_memory() -> Result<()> {
    let c = include_str!("../../../userlib/examples/votes.c");
    let c = compile("", "votes", c);
    let rust = "/kite/target/release/examples/votes";
    host("cd /kite && cargo build -q --release -p kite --example votes");
    let pair = pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    for (counter, voter) in [(c.as_str(), rust), (rust, c.as_str())] {
        let mut counter = two.command(installed(counter)).user("alice").spawn()?;
        counter.read_until("counting", SOON)?;
        for (node, choice) in [(one, 1), (two, 2), (one, 1)] {
            run_installed(node, &format!("{voter} {choice}"))?;
        }
        let output = counter.wait(SOON)?;
        assert!(output.stdout.ends_with("[0, 2, 1]\n"), "{output:#?}");
    }
    Ok(())
}

#[test]
fn priority_samples_send_with_low_priority() -> Result<()> {
    let c = include_str!("../../../userlib/examples/background.c");
    let c = compile("", "background", c);
    let rust = "/kite/target/release/examples/background";
    host("cd /kite && cargo build -q --release -p kite --example background");
    let pair = pair()?;
    for program in [c.as_str(), rust] {
        let said = run_installed(pair.node(1), &format!("{program} 2"))?;
        assert_eq!(said, "16 MiB written");
    }
    Ok(())
}

/// Limits of locked memory in KiB: less than one part of a transfer, and Debian's default.
const LOCK_LIMITS: [u32; 2] = [64, 8192];

#[test]
fn transfers_succeed_under_any_limit_of_locked_memory() -> Result<()> {
    let c = compile("", "locked", include_str!("../guest/locked.c"));
    let pair = pair()?;
    for limit in LOCK_LIMITS {
        let limited =
            |line: &str| run_installed(pair.node(1), &format!("ulimit -l {limit}; {line}"));
        assert_eq!(limited(&format!("{c} transfer 2"))?, "all is well");
        limited(
            "head -c 1500000 /dev/urandom >limited.tar
            kite put limited.tar limited --node 2
            kite get limited copy.tar && cmp limited.tar copy.tar
            kite free limited && rm limited.tar copy.tar",
        )?;
    }
    Ok(())
}

#[test]
fn repeated_register_and_deregister_succeeds() -> Result<()> {
    let c = compile("", "locked", include_str!("../guest/locked.c"));
    let pair = pair()?;
    let node = pair.node(1);
    let as_user = run_installed(node, &format!("ulimit -l 8192; {c} register 6 4 8"))?;
    // A node has 1 GiB, of which an eighth may be pinned after it was taken back.
    let as_root = node.sh(&installed(&format!("{c} register 64 5 192")))?;
    assert_eq!([as_user, as_root], ["all is well", "all is well"]);
    Ok(())
}

#[test]
fn c_library_waits_end_by_timeout_signal_and_cancel() -> Result<()> {
    let c = compile("", "waits", include_str!("../guest/waits.c"));
    let pair = pair()?;
    assert_eq!(run_installed(pair.node(1), &c)?, "all is well");
    Ok(())
}

#[test]
fn library_exports_only_prefixed_names() {
    let place = *INSTALLED;
    let names = host(&format!(
        "nm --dynamic --defined-only --format=just-symbols {place}/usr/local/lib/libkite.so"
    ));
    let prefixed = |name: &&str| name.starts_with("LT_") || name.starts_with("kr_");
    assert!(names.lines().count() > 50);
    assert_eq!(names.lines().find(|name| !prefixed(name)), None);
}

#[test]
fn headers_compile_beside_names_of_the_program() {
    let place = *INSTALLED;
    let headers = ["kite", "krcore", "lite"].map(|name| format!("#include <kite/{name}.h>\n"));
    let headers = headers.concat();
    let c = "static int queue[4], qpush, qpop, lock, request, completion;
        int *names(void) { qpush = qpop = lock = request = completion; return queue; }";
    let cxx = "namespace std { template <class T> struct queue {}; struct message {}; }
        using namespace std; queue<int> ints; message greeting;";
    let paper = "int main(void) { int qd = queue(); return qbind(qd, 7) + qclose(qd); }";
    for (options, source) in [
        ("-x c -std=c11", format!("{headers}{c}\n")),
        ("-x c++ -std=c++20", format!("{headers}{cxx}\n")),
        (
            "-x c -std=c11 -DKITE_KRCORE_NAMES",
            format!("{headers}{paper}\n"),
        ),
    ] {
        fs::write(format!("{place}/names"), source).unwrap();
        host(&format!(
            "clang {options} -Wall -Wextra -pedantic -Werror -fsyntax-only -I{place}/usr/local/include {place}/names"
        ));
    }
}

#[test]
fn io_queue_samples_square_numbers() -> Result<()> {
    let c = include_str!("../../../userlib/examples/queue.c");
    let c = compile("", "queue", c);
    let rust = "/kite/target/release/examples/queue";
    host("cd /kite && cargo build -q --release -p kite --example queue");
    let pair = pair()?;
    for (program, node) in [(c.as_str(), 1), (&c, 2), (rust, 2)] {
        let said = run_installed(pair.node(1), &format!("{program} {node}"))?;
        assert_eq!(said, "[0, 1, 4, 9, 16, 25, 36, 49]");
    }
    Ok(())
}

#[test]
fn io_queue_samples_serve_calls() -> Result<()> {
    let c = include_str!("../../../userlib/examples/serve_queue.c");
    let c = compile("", "serve_queue", c);
    let rust = "/kite/target/release/examples/serve_queue";
    host("cd /kite && cargo build -q --release -p kite --example serve_queue");
    let pair = pair()?;
    for program in [c.as_str(), rust] {
        let said = run_installed(pair.node(1), program)?;
        assert_eq!(said, "[0, 1, 4, 9, 16, 25, 36, 49]");
    }
    Ok(())
}

#[test]
fn lock_samples_alternate() -> Result<()> {
    let c = include_str!("../../../userlib/examples/locks.c");
    let c = compile("", "locks", c);
    let rust = "/kite/target/release/examples/locks";
    host("cd /kite && cargo build -q --release -p kite --example locks");
    let pair = pair()?;
    let run = |node: usize, program: &str| {
        let line = installed(&format!("{program} 3"));
        pair.node(node).command(line).user("alice").spawn()
    };
    let mut all = [run(1, &c)?, run(2, rust)?, run(2, &c)?];
    let said = outputs(&mut all, SOON)?.concat();
    let mut lines: Vec<&str> = said.lines().collect();
    lines.sort_unstable();
    let (one, two) = ("node 1 was here", "node 2 was here");
    assert_eq!(lines, [one, two, two]);
    Ok(())
}

/// Takes a lock of a region that it makes, and frees the region when SIGTERM comes.
const FREES_LOCKED: &str = r#"
#include <kite/lite.h>
#include <signal.h>
#include <stdio.h>

int main(void)
{
	uint64_t lock;
	sigset_t set;
	int own = LT_join(NULL);
	LT_lh lh = own < 0 ? own : LT_malloc(NULL, 0, 8, "locked", LT_WRITE | LT_READ);

	sigemptyset(&set);
	sigaddset(&set, SIGTERM);
	sigprocmask(SIG_BLOCK, &set, NULL);
	if (lh < 0 || LT_lock(lh, 7, 0, 0, &lock))
		return 1;
	puts("locked");
	fflush(stdout);
	sigwait(&set, &own);
	return LT_free(lh) != 0;
}
"#;

#[test]
fn lock_waiter_of_a_freed_region_fails() -> Result<()> {
    let program = compile("", "frees", FREES_LOCKED);
    let pair = pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    let mut owner = one.command(installed(&format!("exec {program}"))).spawn()?;
    owner.read_until("locked", SOON)?;
    let before = two.stats()?["lock_waits"];
    let mut waiting = two.workload("locks hold locked 7").spawn()?;
    until("it to stand in line", SOON, || {
        Ok(two.stats()?["lock_waits"] > before)
    })?;
    owner.signal("TERM")?;
    assert!(owner.wait(SOON)?.success());
    let output = waiting.wait(SOON)?;
    assert!(output.stderr.contains("was freed"), "{output:#?}");
    Ok(())
}

/// Lets a server on node 2 be called from node 1, with those arguments; both are given as they are started.
fn capitals(pair: &Cluster, server: &str, caller: &str, args: &str, want: &str) -> Result<()> {
    let (one, two) = (pair.node(1), pair.node(2));
    let mut server = two.command(installed(server)).user("alice").spawn()?;
    server.read_until("serving", SOON)?;
    let said = run_installed(one, &format!("{caller} {args}"))?;
    assert_eq!(said, want);
    let output = server.wait(SOON)?;
    assert!(output.success(), "{output:#?}");
    assert!(output.stdout.ends_with("node 1: BYE\n"), "{output:#?}");
    Ok(())
}

#[test]
fn rpc_samples_call_each_other() -> Result<()> {
    let c = include_str!("../../../userlib/examples/rpc.c");
    let c = compile("", "rpc", c);
    let rust = "/kite/target/release/examples/rpc";
    host("cd /kite && cargo build -q --release -p kite --example rpc");
    let pair = pair()?;
    for (server, caller) in [(c.as_str(), rust), (rust, c.as_str())] {
        capitals(&pair, server, caller, "hello", "HELLO")?;
        capitals(&pair, server, caller, "hello 50000", "250000 bytes")?;
    }
    Ok(())
}

/// A caller that waits for a server whose handle was closed gets an error, and so do later callers.
#[test]
fn unmapped_handle_serves_no_call() -> Result<()> {
    let server = compile("", "forsaken", include_str!("../guest/forsaken.c"));
    let caller = compile("", "rpc", include_str!("../../../userlib/examples/rpc.c"));
    let pair = pair()?;
    let mut server = pair
        .node(2)
        .command(installed(&server))
        .user("alice")
        .spawn()?;
    server.read_until("serving", SOON)?;
    let refused = |how: &str| -> Result<()> {
        let line = installed(&format!("{caller} hello"));
        let mut call = pair.node(1).command(line).user("alice").spawn()?;
        let output = call.wait(SOON)?;
        assert!(output.stderr.contains(how), "{how}: {output:?}");
        Ok(())
    };
    refused("Connection reset by peer")?;
    server.read_until("gave it back: 0", SOON)?;
    refused("Connection refused")?;
    server.kill()?;
    pair.node(2).kite("free capitals").map(drop)
}

#[test]
fn multicast_samples_receive_a_reply_from_each() -> Result<()> {
    let c = include_str!("../../../userlib/examples/multicast.c");
    let c = compile("", "multicast", c);
    let rust = "/kite/target/release/examples/multicast";
    host("cd /kite && cargo build -q --release -p kite --example multicast");
    let pair = pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    let start = |node: &Node, name: &str| {
        let line = format!("/kite/target/release/kite bench serve {name}");
        let mut process = node.spawn(&line)?;
        process.read_until("serving", SOON)?;
        Ok::<_, kite_cluster::Error>(process)
    };
    let mut servers = [
        start(one, "here")?,
        start(two, "there")?,
        start(two, "gone")?,
    ];
    servers[2].kill()?;
    for (program, refused) in [
        (c.as_str(), "Connection refused"),
        (rust, "the region has no server, or the port no listener"),
    ] {
        let line = installed(&format!("{program} here gone there"));
        let said = one.command(line).sh()?;
        assert_eq!(said, format!("here: hhhhh\ngone: {refused}\nthere: hhhhh"));
    }
    for server in &mut servers[..2] {
        server.kill()?;
    }
    for name in ["here", "there", "gone"] {
        one.kite(&format!("free {name}"))?;
    }
    Ok(())
}

#[test]
fn kernel_module_serves_and_makes_calls() -> Result<()> {
    let pair = pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    one.sh("insmod /run/kite/build/user/kite_server.ko name=inverter calls=100")?;
    let line = "rpc invert inverter --threads 2 --operations 50";
    for node in [one, two] {
        node.workload(line).user("alice").sh()?;
    }
    assert!(!one.run("rmmod kite")?.success());
    one.sh("rmmod kite_server")?;
    for node in [one, two] {
        node.await_gauges("regions=0 open_handles=0 lent_bytes=0", SOON)?;
    }
    Ok(())
}

#[test]
fn kernel_module_sample_greets_other_nodes() -> Result<()> {
    let pair = pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    one.sh("insmod /run/kite/build/user/kite_user.ko greet=1 && rmmod kite_user")?;
    let got = run_installed(two, "kite get greeting got; head -c 5 got")?;
    assert_eq!(got, "hello");
    one.kite("free greeting")?;
    Ok(())
}

#[test]
fn rust_module_sample_counts_greetings() -> Result<()> {
    let pair = pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    one.sh("dmesg --clear; insmod /run/kite/build/user/kite_rust.ko node=2")?;
    let got = run_installed(two, "kite get rust got; head -c 15 got")?;
    assert_eq!(got, "hello from Rust");
    let line = "atomics tally rust 64 --threads 2 --operations 5";
    two.workload(line).sh()?;
    one.sh("rmmod kite_rust")?;
    let said = one.sh("dmesg | grep -o 'kite_rust: .*'")?;
    assert_eq!(said.trim(), "kite_rust: 10 were greeted");
    Ok(())
}

#[test]
fn kernel_module_accesses_local_and_remote_memory() -> Result<()> {
    let pair = pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    for parameters in ["node=0", "node=2", "node=2 len=1", "node=2 len=4096"] {
        one.sh(&format!(
            "insmod /run/kite/build/user/kite_user.ko {parameters} && rmmod kite_user"
        ))?;
    }
    // The end of an anonymous region has no waiter.
    for node in [one, two] {
        node.await_gauges("regions=0 open_handles=0 lent_bytes=0", SOON)?;
    }
    Ok(())
}

/// Watches a region from the kernel of node 1 until `end` has ended that. Returns the error.
fn watch(pair: &Cluster, end: impl FnOnce() -> Result<()>) -> Result<String> {
    let (one, two) = (pair.node(1), pair.node(2));
    pair.start_kite(&Setup::default())?;
    two.kite("alloc watched 64K")?;
    one.sh("insmod /run/kite/build/user/kite_watch.ko region=watched")?;
    let parameter = |name| one.sh(&format!("cat /sys/module/kite_watch/parameters/{name}"));
    until("it to be read", SOON, || Ok(parameter("reads")? != "0"))?;
    assert!(!one.run("rmmod kite")?.success());
    end()?;
    until("the end", SOON, || Ok(parameter("ended")? != "0"))?;
    let error = parameter("ended")?;
    one.sh("rmmod kite_watch")?;
    Ok(error)
}

#[test]
fn kernel_module_gets_the_reason_of_a_failure() -> Result<()> {
    let pair = pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    const ESTALE: &str = "-116";
    const EHOSTDOWN: &str = "-112";
    const ENODEV: &str = "-19";
    let freed = watch(&pair, || two.kite("free watched").map(drop))?;
    assert_eq!(freed, ESTALE);
    let left = watch(&pair, || two.stop_kited())?;
    assert_eq!(left, EHOSTDOWN);
    let removed = watch(&pair, || one.remove_rnic())?;
    assert_eq!(removed, ENODEV);
    two.kite("free watched")?;
    Ok(())
}

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
             mkdir -p /run/systemd/system /tmp/bin && \
             ln -sf /kite/tests/cluster/guest/systemctl /tmp/bin/systemctl")?;
    }
    let kite = "PATH=/tmp/bin:$PATH /kite/target/release/kite";
    let said = one.sh(&format!("{kite} init --listen 10.77.0.1"))?;
    assert!(said.starts_with("node 1 of 1\n"), "{said}");
    let (_, join) = said.split_once("root@NODE kite ").expect(&said);
    let join = join.strip_suffix(" </etc/kite/key").expect(join);
    let key = one.sh("base64 /etc/kite/key")?;
    let said = two.sh(&format!("echo {key} | base64 -d | {kite} {join}"))?;
    assert_eq!(said, "node 2 of 2");
    one.await_view(1, 2)?;
    for (node, said) in [(two, "node 2 left"), (one, "node 1 left")] {
        let left = node.sh(&format!("{kite} leave --yes"))?;
        assert!(left.starts_with(said), "{left}");
        node.sh("umount -l /etc; rm -r /run/etc /run/systemd/system /tmp/bin")?;
    }
    Ok(())
}
