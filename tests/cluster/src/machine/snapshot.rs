// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Snapshots of booted machines, from which emulated nodes start.
//!
//! A boot costs 30 s of a processor, and a start from a snapshot 3 s. All machines of one shape (kernel, fabric,
//! processors, memory) are equal until init needs the identity of the node. So a machine without a number, the
//! template, boots once for each shape, and its state is saved at that point. A node starts from that state, with its
//! own RNICs, and gets its identity by its second serial line. The device `vmgenid` makes the kernel reseed its random
//! numbers.
//!
//! A snapshot is `target/snapshots/SHAPE/state`. It is made again if the file `key` beside it does not match the build
//! root, the sources of the machine, and `guest/init`. A lock of the directory serializes its users. A template that
//! fails leaves no snapshot, since `key` is removed first and written last.

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{flock, FlockOperation};
use serde_json::json;

use crate::builder::boot_limit;
use crate::error::{Context, Error, Result};
use crate::machine::accel::Accel;
use crate::machine::qemu::{Machine, Plan, TEMPLATE};
use crate::machine::qmp::Qmp;
use crate::report::console::Console;
use crate::TOP;

/// Message of `guest/init` before it waits for the identity of the node.
const WAITING: &str = "kite: waiting for identity";

/// Sources that determine the state of a template.
const SOURCES: [&str; 9] = [
    include_str!("accel.rs"),
    include_str!("qemu.rs"),
    include_str!("qmp.rs"),
    include_str!("snapshot.rs"),
    include_str!("../fabric/mod.rs"),
    include_str!("../../guest/init"),
    include_str!("../../guest/fstab"),
    include_str!("../../guest/fabric-connectx"),
    include_str!("../../guest/fabric-rxe"),
];

/// Files that change with the build root: the stamps of the set-up, and the list of installed packages.
const ROOT_STATE: [&str; 2] = ["/var/lib/kite", "/var/lib/dpkg/status"];

/// Returns the snapshot from which the machine of `plan` starts, and makes it if needed. Returns `None` for a machine
/// that boots by itself: by KVM or firmware, as a Debian host, with parameters, or with counted instructions.
pub(crate) fn snapshot(plan: &Plan) -> Result<Option<PathBuf>> {
    let alone = plan.system.is_some() || plan.firmware.is_some() || !plan.parameters.is_empty();
    if alone || plan.accel != Accel::Tcg {
        return Ok(None);
    }
    let dir = Path::new(TOP).join("target/snapshots").join(shape(plan));
    let what = || format!("preparing {}", dir.display());
    fs::create_dir_all(&dir).context(what)?;
    let lock = File::create(dir.join("lock")).context(what)?;
    flock(&lock, FlockOperation::LockExclusive).context(what)?;
    let (state, key_file, key) = (dir.join("state"), dir.join("key"), key(plan)?);
    if fs::read_to_string(&key_file).is_ok_and(|made| made == key) {
        return Ok(Some(state));
    }
    let _ = fs::remove_file(&key_file);
    save(&template(plan, &dir), &state)?;
    fs::write(&key_file, key).context(what)?;
    Ok(Some(state))
}

fn shape(plan: &Plan) -> String {
    format!(
        "{}-{}-{}-{}-{}",
        plan.kernel.build(),
        plan.fabric,
        plan.cpus,
        plan.memory_mib,
        plan.rnics
    )
}

fn template(plan: &Plan, dir: &Path) -> Plan {
    Plan {
        number: TEMPLATE,
        dir: dir.into(),
        ..plan.clone()
    }
}

/// Returns a number that changes with whatever determines the state of a template.
fn key(plan: &Plan) -> Result<String> {
    let mut hasher = DefaultHasher::new();
    (SOURCES, plan.kernel.release()?).hash(&mut hasher);
    // The debug kernel is no package, and may be built again.
    let files = ROOT_STATE.map(PathBuf::from).into_iter();
    for path in files.chain([plan.kernel.image()?]) {
        let metadata = fs::metadata(&path).context(|| format!("reading {}", path.display()))?;
        metadata.modified().ok().hash(&mut hasher);
    }
    Ok(format!("{:016x}", hasher.finish()))
}

/// Boots the template, once more if that fails, and saves its state.
fn save(plan: &Plan, state: &Path) -> Result<()> {
    let (_machine, mut qmp) = boot(plan).or_else(|_| boot(plan))?;
    qmp.execute("stop", json!({}))?;
    qmp.migrate("migrate", state)
}

fn boot(plan: &Plan) -> Result<(Machine, Qmp)> {
    let mut machine = plan.start(false)?;
    let mut qmp = Qmp::new(machine.qemu.child())?;
    qmp.execute("cont", json!({}))?;
    let console = Console::new(plan.file("console"));
    let deadline = Instant::now() + boot_limit();
    while !console.since(0).contains(WAITING) {
        if machine.qemu.status().is_some() || Instant::now() > deadline {
            return Err(Error::Boot {
                node: plan.name(),
                why: "the template of its shape did not boot".into(),
                log: console.reason(0, 30),
                console: console.path().into(),
            });
        }
        thread::sleep(Duration::from_millis(50));
    }
    Ok((machine, qmp))
}
