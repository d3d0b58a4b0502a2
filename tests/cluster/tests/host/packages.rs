// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Debian packages on fresh Debian hosts: a host from installation to purge, module signatures, and the disk image.
//!
//! `make test ONLY=packages` runs these tests, since they need `make image`.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use kite_cluster::{outputs, until, Cluster, Fabric, Hosts, ImageMachine, Kernel, Node, Result};

/// Packages that `make deb` built.
const PACKAGES: &str = "/kite/target/deb";

/// The repository of an older version, at its path on hosts.
const OLDER: &str = "/kite/target/hosts/older";

/// Timeout of apt and dpkg on an emulated machine.
const APT: Duration = Duration::from_secs(900);

const SOON: Duration = Duration::from_secs(90);

/// Timeout of firmware, boot loader, initramfs and systemd on an emulated machine.
const BOOT: Duration = Duration::from_secs(1500);

/// Runs a command in the build root. Returns its output.
fn host(line: &str) -> String {
    let output = Command::new("bash")
        .args(["-euc", &format!("exec 2>&1; cd /kite; {line}")])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).trim().to_string();
    assert!(output.status.success(), "{line}: {text}");
    text
}

/// Makes a repository of the same packages with a lower version, whose metapackage depends on the module for the
/// oldest kernel, and whose daemon runs as root.
fn older_repository(oldest: &str) {
    host(&format!(
        r#"rm -rf {OLDER}; mkdir -p {OLDER}.debs
        for deb in {PACKAGES}/*.deb; do
            case $deb in */libkite-dev_* | *-dbgsym_*) continue ;; esac
            tree=$(mktemp -d) version=$(dpkg-deb -f "$deb" Version)
            dpkg-deb -R "$deb" "$tree"
            sed -i "s/\b$version\b/${{version%-*}}-0.1/" "$tree/DEBIAN/control"
            unit=$tree/usr/lib/systemd/system/kited.service
            [ ! -e "$unit" ] || sed -i '/^\(User\|SupplementaryGroups\|AmbientCapabilities\|LoadCredential\)=/d' "$unit"
            sed -i '/^Package: kite-module-amd64/,$ s/kite-module-[0-9][^ ]*/kite-module-{oldest}/' \
                "$tree/DEBIAN/control"
            dpkg-deb --root-owner-group -Znone -b "$tree" {OLDER}.debs/ >/dev/null
            rm -rf "$tree"
        done
        scripts/package/make-repo {OLDER} file:{OLDER} {OLDER}.debs/*.deb
        rm -rf {OLDER}.debs"#
    ));
}

/// Runs a line on these nodes at once. All must succeed.
fn at_once(nodes: &[&Node], line: &str, limit: Duration) -> Result<Vec<String>> {
    let start = |node: &&Node| node.spawn(line);
    let mut running = nodes.iter().map(start).collect::<Result<Vec<_>>>()?;
    outputs(&mut running, limit)
}

/// Runs the two commands that add a repository.
fn add_repository(nodes: &[&Node], directory: &str) -> Result<()> {
    let line = format!(
        "sed 's|^URIs:.*|URIs: file:{directory}|' {directory}/kite.sources \
            >/etc/apt/sources.list.d/kite.sources && apt-get -q update >&2"
    );
    at_once(nodes, &line, APT).map(drop)
}

fn boot(hosts: &Hosts, kernels: &[Kernel]) -> Result<Cluster> {
    let builder = Cluster::builder().name("packages").fabric(Fabric::Rxe);
    let numbered = kernels.iter().enumerate();
    let builder = numbered.fold(builder.hosts(hosts), |builder, (index, &kernel)| {
        builder.kernel(index + 1, kernel)
    });
    let cluster = builder.boot()?;
    let nodes: Vec<_> = cluster.nodes().iter().collect();
    let link = "modprobe -a rdma_rxe ib_uverbs rdma_ucm && rdma link add rxe0 type rxe netdev eth0";
    at_once(&nodes, link, SOON)?;
    Ok(cluster)
}

/// Makes the first node the seed of a cluster that the others join.
fn start(cluster: &Cluster) -> Result<()> {
    let (seed, others) = cluster.nodes().split_first().expect("a node");
    seed.command("kite init").limit(SOON).sh()?;
    let key = seed.sh("base64 --wrap=0 /etc/kite/key")?;
    let others: Vec<_> = others.iter().collect();
    let join = format!("echo {key} | base64 -d | kite join 10.77.0.1 --key-file -");
    at_once(&others, &join, SOON)?;
    let nodes: Vec<_> = cluster.nodes().iter().collect();
    at_once(&nodes, "usermod -aG kite alice", SOON).map(drop)
}

/// Waits until each node has a view of all nodes.
fn wait_joined(cluster: &Cluster) -> Result<()> {
    let count = cluster.nodes().len();
    let joined = |node: &Node| {
        // The first line is the heading.
        Ok(node.run("kite nodes")?.stdout.lines().count() == count + 1)
    };
    for node in cluster.nodes() {
        until("a view of all nodes", SOON, || joined(node))?;
    }
    Ok(())
}

/// Shares a file between two nodes as an ordinary user in the group kite.
fn share(from: &Node, to: &Node, name: &str) -> Result<()> {
    let put = format!("kite put /etc/os-release {name} --node 2");
    from.command(put).user("alice").sh()?;
    let get = format!("kite get {name} /tmp/{name} && cmp /tmp/{name} /etc/os-release");
    to.command(get).user("alice").sh()?;
    from.command(format!("kite free {name}"))
        .user("alice")
        .sh()?;
    Ok(())
}

/// Returns the incarnations of all nodes in the view of a node.
fn lives(node: &Node) -> Result<String> {
    node.sh("kite nodes | awk 'NR > 1 { print $1, $3 }'")
}

/// Returns the user of the daemon. A daemon other than root's has the capability CAP_NET_ADMIN, number 12, alone.
fn daemon_user(node: &Node) -> Result<String> {
    node.sh(
        "pid=$(systemctl show -P MainPID kited); user=$(stat -c %U /proc/$pid); echo $user; \
         [ $user = root ] || grep -q '^CapPrm:.0*1000$' /proc/$pid/status",
    )
}

fn version(node: &Node, package: &str) -> Result<String> {
    node.sh(&format!("dpkg-query -W -f '${{Version}}' {package}"))
}

/// Returns permanent files of a host: without logs, caches and state of apt and dpkg.
fn lasting(hosts: &Hosts, number: usize) -> Result<BTreeSet<String>> {
    const PASSING: [&str; 14] = [
        "/dev",
        "/home",
        "/kite",
        "/proc",
        "/root",
        "/run",
        "/sys",
        "/tmp",
        "/var/cache",
        "/var/lib/apt",
        "/var/lib/dpkg",
        "/var/lib/systemd",
        "/var/log",
        "/var/tmp/systemd-private-",
    ];
    const BACKUPS: [&str; 8] = [
        "/etc/.pwd.lock",
        "/etc/group-",
        "/etc/gshadow-",
        "/etc/passwd-",
        "/etc/shadow-",
        "/etc/apt/sources.list.d/kite.sources",
        "/etc/subgid-",
        "/etc/subuid-",
    ];
    let passes =
        |file: &str| PASSING.iter().any(|at| file.starts_with(at)) || BACKUPS.contains(&file);
    Ok(hosts
        .files(number)?
        .into_iter()
        .filter(|file| !passes(file))
        .collect())
}

fn accounts(hosts: &Hosts, number: usize) -> String {
    ["passwd", "group"]
        .map(|file| fs::read_to_string(hosts.root(number).join("etc").join(file)).unwrap())
        .concat()
}

/// Installs the older packages: the metapackage on the first host, a module alone on the others.
fn install(nodes: [&Node; 3], oldest: &str) -> Result<()> {
    add_repository(&nodes, OLDER)?;
    let apt = "DEBIAN_FRONTEND=noninteractive apt-get -qy install kite-tools";
    let line = format!(
        "case $(hostname) in node1) {apt} kite-module-amd64 ;; \
         *) {apt} kite-module-{oldest} libkite-verbs ;; esac >&2"
    );
    at_once(&nodes, &line, APT)?;
    for state in ["is-enabled", "is-active"] {
        let kited = nodes[0].run(&format!("systemctl {state} kited"))?;
        assert!(!kited.success(), "{state}: {kited:?}");
    }
    Ok(())
}

/// Upgrades all packages while a region exists. The region survives, since a restart of kited keeps the incarnation
/// of the node. The metapackage brings the newer kernel and its module to the first host.
fn upgrade(nodes: [&Node; 2], kernels: [&str; 2]) -> Result<()> {
    let older = version(nodes[1], "kite-tools")?;
    let before = lives(nodes[0])?;
    let user = |line: &str| nodes[1].command(line).user("alice").sh();
    user("kite put /etc/os-release kept")?;
    add_repository(&nodes, "/kite/target/repo")?;
    let apt = "DEBIAN_FRONTEND=noninteractive apt-get -qy --with-new-pkgs upgrade >&2";
    at_once(&nodes, apt, APT)?;
    assert_ne!(version(nodes[1], "kite-tools")?, older);
    at_once(&nodes, "systemctl is-active kited", SOON)?;
    assert_eq!(lives(nodes[0])?, before);
    for node in nodes {
        assert_eq!(daemon_user(node)?, "_kited");
    }
    nodes[0].sh("[ $(stat -c %U /var/lib/kite/*.state) = _kited ]")?;
    user("kite get kept /tmp/kept && cmp /tmp/kept /etc/os-release && kite free kept")?;
    for kernel in kernels {
        nodes[0].sh(&format!(
            "test -e /boot/vmlinuz-{kernel} && modinfo -k {kernel} kite"
        ))?;
    }
    Ok(())
}

fn downgrade(node: &Node, to: &str, oldest: &str) -> Result<()> {
    add_repository(&[node], OLDER)?;
    let apt = format!(
        "DEBIAN_FRONTEND=noninteractive apt-get -qy --allow-downgrades install kite-tools={to} \
         libkite-verbs={to} kite-module-{oldest}={to} >&2"
    );
    node.command(apt).limit(APT).sh()?;
    assert_eq!(version(node, "kite-tools")?, to);
    Ok(())
}

fn purge(nodes: &[&Node]) -> Result<()> {
    let apt =
        "DEBIAN_FRONTEND=noninteractive apt-get -qy purge '^kite-.*' '^libkite.*' >&2 && rmmod kite";
    at_once(nodes, apt, APT).map(drop)
}

/// Installs and starts kite by two commands on a host that has only its repository.
fn install_and_start(node: &Node) -> Result<()> {
    let apt = "DEBIAN_FRONTEND=noninteractive apt-get -qy install kite-module-amd64 kite-tools >&2";
    node.command(apt).limit(APT).sh()?;
    node.command("kite init").limit(SOON).sh()?;
    let state = node.sh("kite status --check")?;
    assert!(state.starts_with("ok: "), "{state}");
    Ok(())
}

#[test]
fn hosts_share_memory_from_installation_until_purge() -> Result<()> {
    let oldest = *Kernel::others()?.last().expect("two kernel series");
    let (oldest_abi, newest_abi) = (oldest.release()?, Kernel::Stock.release()?);
    older_repository(&oldest_abi);
    let hosts = Hosts::fresh("life", 3)?;

    let cluster = boot(&hosts, &[oldest; 3])?;
    let [one, two, three] = [1, 2, 3].map(|number| cluster.node(number));
    let (files, users) = (lasting(&hosts, 2)?, accounts(&hosts, 2));
    install([one, two, three], &oldest_abi)?;
    let older = version(two, "kite-tools")?;
    start(&cluster)?;
    wait_joined(&cluster)?;
    assert_eq!(daemon_user(one)?, "root");
    share(one, two, "installed")?;
    share(three, one, "third")?;
    assert_eq!(one.sh("runuser -l alice -c 'ulimit -l'")?, "1048576");

    upgrade([one, two], [&oldest_abi, &newest_abi])?;
    wait_joined(&cluster)?;
    share(two, one, "upgraded")?;

    downgrade(two, &older, &oldest_abi)?;
    wait_joined(&cluster)?;
    share(two, one, "downgraded")?;
    cluster.shutdown()?;

    let cluster = boot(&hosts, &[Kernel::Stock, oldest, oldest])?;
    wait_joined(&cluster)?;
    let [one, two] = [1, 2].map(|number| cluster.node(number));
    assert_eq!(one.sh("uname -r")?, newest_abi);
    share(one, two, "rebooted")?;

    purge(&[one, two])?;
    let left: Vec<_> = lasting(&hosts, 2)?.difference(&files).cloned().collect();
    assert!(left.is_empty(), "{left:#?}");
    // alice was in the group kite, which purge removes.
    assert_eq!(accounts(&hosts, 2), users);
    install_and_start(one)?;
    cluster.shutdown()
}

/// Unpacks the module of the packages, with its signature, where nodes see it.
fn signed_module() -> String {
    let place = "/kite/target/hosts/signed";
    let abi = Kernel::Stock.release().unwrap();
    host(&format!(
        "rm -rf {place}; dpkg-deb -x {PACKAGES}/kite-module-{abi}_*.deb {place}"
    ));
    let module = format!("{place}/usr/lib/modules/{abi}/updates/kite.ko");
    assert!(Path::new(&module).exists());
    module
}

/// Tries to load a module. Returns the error, or an empty string.
fn try_load(node: &Node, module: &str) -> Result<String> {
    let load = format!("modprobe -a $(modinfo -F depends {module} | tr , ' '); insmod {module}");
    Ok(node.run(&load)?.stderr)
}

#[test]
fn kernel_with_sig_enforce_rejects_unsigned_and_unknown_modules() -> Result<()> {
    let signed = signed_module();
    let cluster = Cluster::builder()
        .name("signatures")
        .nodes(1)
        .fabric(Fabric::Rxe)
        .kernel_parameters("module.sig_enforce=1")
        .boot()?;
    let node = cluster.node(1);
    for module in ["/kite/build/kite.ko", &signed] {
        let error = try_load(node, module)?;
        assert!(
            error.contains("Key was rejected by service"),
            "{module}: {error}"
        );
    }
    node.sh("! grep '^kite ' /proc/modules")?;
    cluster.shutdown()
}

#[test]
fn secure_boot_kernel_loads_only_modules_of_an_enrolled_key() -> Result<()> {
    let signed = signed_module();
    let cluster = Cluster::builder()
        .name("secure-boot")
        .nodes(1)
        .fabric(Fabric::Rxe)
        .secure_boot()
        .boot()?;
    let node = cluster.node(1);
    assert!(node
        .sh("mount -t securityfs none /sys/kernel/security; cat /sys/kernel/security/lockdown")?
        .contains("[integrity]"));
    let error = try_load(node, "/kite/build/kite.ko")?;
    assert!(
        error.contains("rejected") || error.contains("not permitted"),
        "{error}"
    );
    assert_eq!(try_load(node, &signed)?, "");
    node.sh("grep '^kite ' /proc/modules")?;
    cluster.shutdown()
}

#[test]
fn image_boots_to_a_cluster_of_one_node() -> Result<()> {
    let machine = ImageMachine::boot("/kite/target/kite.qcow2")?;
    let console = machine.await_console("cluster: node 1 of 1", BOOT)?;
    assert!(console.contains("rxe0: active"), "{console}");
    Ok(())
}
