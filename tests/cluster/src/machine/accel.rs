// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Execution of the guests' instructions: by KVM where it works, else by emulation.
//!
//! A KVM device that opens proves little: nested virtualization may fail at the first instruction that it does
//! not support. So the stock kernel is booted once, for at most 10 s. The verdict is kept until the host boots
//! again.

use std::arch::x86_64::_rdtsc;
use std::fs::{self, File};
use std::process::{Command, Stdio};
use std::sync::LazyLock;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{flock, FlockOperation};

use crate::error::{Context, Result};
use crate::machine::guarded::Guarded;
use crate::machine::kernel::Kernel;
use crate::machine::qemu;

const VERDICT: &str = "/var/cache/kite-kvm";
const TRIAL: Duration = Duration::from_secs(10);

/// Each byte of an emulated `rep movsb` takes as long as an instruction, so kernels must not use it as fast.
const EMULATED: &str = "max,erms=off,fsrm=off,fsrs=off";

/// Frequency of the TSC of this host, measured once, for 100 ms.
static TSC_KHZ: LazyLock<u64> = LazyLock::new(tsc_khz);

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Accel {
    Kvm,
    Tcg,
    /// Emulated on one thread, with clocks that advance a nanosecond with each instruction.
    Icount,
}

impl Accel {
    /// Returns KVM if it works on this host, else TCG.
    pub(crate) fn detect() -> Result<Self> {
        if File::options()
            .read(true)
            .write(true)
            .open("/dev/kvm")
            .is_err()
        {
            return Ok(Accel::Tcg);
        }
        let what = || format!("using {VERDICT}");
        let lock = File::create(format!("{VERDICT}.lock")).context(what)?;
        flock(&lock, FlockOperation::LockExclusive).context(what)?;
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").context(what)?;
        let known = fs::read_to_string(VERDICT).unwrap_or_default();
        match known.strip_prefix(&boot) {
            Some("kvm") => Ok(Accel::Kvm),
            Some("tcg") => Ok(Accel::Tcg),
            _ => decide(&boot),
        }
    }

    pub(crate) fn args(self) -> &'static [&'static str] {
        match self {
            Accel::Kvm => &["-accel", "kvm", "-cpu", "host"],
            // With a thread for each processor, one may translate code that another one then changes, and keep the
            // translation. A kernel that patches itself during boot then sometimes dies or hangs.
            Accel::Tcg => &["-accel", "tcg,thread=single", "-cpu", EMULATED],
            // While all processors sleep, guest time follows host time: their wakeups come from the host.
            Accel::Icount => &[
                "-accel",
                "tcg,thread=single",
                "-cpu",
                EMULATED,
                "-icount",
                "shift=0,sleep=on",
            ],
        }
    }

    /// Returns parameters of the guest's kernel. An emulated TSC counts as that of this host. The kernel would measure
    /// the frequency against emulated timers: on a busy host the result was once 40 times too low, and the clock 40
    /// times too fast.
    pub(crate) fn kernel_parameters(self) -> String {
        match self {
            Accel::Tcg => format!("tsc_early_khz={}", *TSC_KHZ),
            Accel::Kvm | Accel::Icount => String::new(),
        }
    }

    /// Returns `true` if a stall in the guest is a fault of the guest, and not of a busy host.
    pub(crate) fn honest_time(self) -> bool {
        self == Accel::Kvm
    }
}

/// Measures the frequency of the TSC of this host.
fn tsc_khz() -> u64 {
    const SAMPLE: Duration = Duration::from_millis(100);
    // SAFETY: Every x86-64 processor has RDTSC, and Linux permits it to programs.
    let read = || unsafe { _rdtsc() };
    let (start, first) = (Instant::now(), read());
    thread::sleep(SAMPLE);
    let (elapsed, ticks) = (start.elapsed(), read() - first);
    ticks * 1_000 / elapsed.as_micros().max(1) as u64
}

fn decide(boot: &str) -> Result<Accel> {
    let (accel, word) = match kvm_boots()? {
        true => (Accel::Kvm, "kvm"),
        false => (Accel::Tcg, "tcg"),
    };
    fs::write(VERDICT, format!("{boot}{word}")).context(|| format!("writing {VERDICT}"))?;
    Ok(accel)
}

/// Boots a kernel without a root file system. KVM works if the kernel panics for the missing file system.
fn kvm_boots() -> Result<bool> {
    let log = format!("{VERDICT}.console");
    let _ = fs::remove_file(&log);
    let mut qemu = Guarded::spawn(trial(&log)?).context(|| "starting QEMU".into())?;
    let deadline = Instant::now() + TRIAL;
    while qemu.status().is_none() && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(50));
    }
    qemu.kill();
    let console = fs::read(&log).unwrap_or_default();
    Ok(String::from_utf8_lossy(&console).contains("Kernel panic"))
}

fn trial(log: &str) -> Result<Command> {
    let mut command = Command::new(qemu::PROGRAM);
    command
        .args([
            "-nodefaults",
            "-display",
            "none",
            "-no-reboot",
            "-m",
            "256M",
        ])
        .args(Accel::Kvm.args())
        .args(["-serial", &format!("file:{log}")])
        .arg("-kernel")
        .arg(Kernel::Stock.image()?)
        .args(["-append", "console=ttyS0 loglevel=5 panic=-1"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    Ok(command)
}
