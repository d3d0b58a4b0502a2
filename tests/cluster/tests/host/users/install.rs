// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Installed files, unit, headers and library.

use std::fs;

use crate::{host, INSTALLED};

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
    let stdout = host(&format!("{place}/usr/local/bin/kite run -v true"));
    let library = format!("LD_PRELOAD={place}/usr/local/lib/kite/libkite_verbs.so");
    assert!(stdout.contains(&library), "{stdout}");
}

#[test]
fn systemd_verifies_the_unit() {
    // In a mount namespace, the files can be at the paths in the unit.
    let faults = host(&format!(
        "unshare --mount sh -euc '
            mount --bind {}/usr/local /usr/local
            systemd-analyze verify --man=no kited.service'",
        *INSTALLED
    ));
    assert_eq!(faults, "");
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
