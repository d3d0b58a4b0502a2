// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The virtual machine of one node: its plan, QEMU's arguments, and its processes.
//!
//! The machine boots a kernel directly into the build root, which virtiofs shares read-only. The root does not change
//! while it is in use, so the guest caches it without revalidation, which halves the boot time. The checkout at /kite
//! changes, and is another share, whose entries are revalidated.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddrV4;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::SystemTime;

use crate::builder::boot_limit;
use crate::error::{Context, Result};
use crate::fabric::Fabric;
use crate::machine::accel::Accel;
use crate::machine::firmware::Firmware;
use crate::machine::guarded::Guarded;
use crate::machine::kernel::Kernel;
use crate::TOP;

pub(crate) const PROGRAM: &str = "qemu-system-x86_64";
const VIRTIOFSD: &str = "/usr/libexec/virtiofsd";

/// Number of the machine whose state is a snapshot for others: see `snapshot`.
pub(crate) const TEMPLATE: usize = 0;

/// Parameters that omit devices and units which a host without a screen does not need: under emulation each costs 1 s.
const LEAN: &str =
    "modprobe.blacklist=psmouse,pcspkr,ahci,i2c_i801,iTCO_wdt,lpc_ich,mousedev,evdev \
    systemd.mask=systemd-journal-flush.service systemd.mask=getty@tty1.service \
    systemd.mask=serial-getty@ttyS0.service systemd.mask=systemd-binfmt.service \
    systemd.mask=modprobe@drm.service systemd.mask=modprobe@efi_pstore.service";

/// Configuration of a node, before it starts.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) number: usize,
    pub(crate) memory_mib: usize,
    pub(crate) cpus: usize,
    /// Number of RNICs, if they are devices of the machine.
    pub(crate) rnics: usize,
    /// `true` if their doorbells are memory, which does not trap.
    pub(crate) map_doorbells: bool,
    /// `true` if the RNICs lack the dynamically connected transport.
    pub(crate) without_dc: bool,
    pub(crate) kernel: Kernel,
    pub(crate) accel: Accel,
    pub(crate) fabric: Fabric,
    /// The root of a Debian host, unless the machine has the build root.
    pub(crate) system: Option<PathBuf>,
    /// UEFI firmware, unless the machine has QEMU's own.
    pub(crate) firmware: Option<Firmware>,
    /// Parameters appended to the kernel's command line.
    pub(crate) parameters: String,
    /// Multicast group of the private network.
    pub(crate) group: SocketAddrV4,
    /// The cluster's directory.
    pub(crate) dir: PathBuf,
}

/// Arguments and processes that one part of a node adds to its machine.
pub(crate) struct Part {
    pub(crate) args: Vec<String>,
    pub(crate) helpers: Vec<Guarded>,
}

/// A running machine. QEMU is the first field, so it ends before its helpers.
pub(crate) struct Machine {
    pub(crate) qemu: Guarded,
    pub(crate) helpers: Vec<Guarded>,
}

impl Plan {
    pub(crate) fn name(&self) -> String {
        format!("node{}", self.number)
    }

    /// A file of this node in the cluster's directory.
    pub(crate) fn file(&self, kind: &str) -> PathBuf {
        self.dir.join(format!("node{}.{kind}", self.number))
    }

    /// Returns the sockets of its RNICs.
    pub(crate) fn rnic_sockets(&self) -> impl Iterator<Item = PathBuf> + '_ {
        (0..self.rnics).map(|index| self.file(&format!("rnic{index}")))
    }

    /// Starts the machine, stopped before its first instruction, or before a snapshot is restored. Its RNICs are added
    /// afterwards.
    pub(crate) fn start(&self, restores: bool) -> Result<Machine> {
        let mut command = Command::new(PROGRAM);
        command.arg("-S");
        if restores {
            command.args(["-incoming", "defer"]);
        }
        command.args(self.base()?).args(self.accel.args());
        command.args(self.boot()?);
        let mut helpers = Vec::new();
        for part in [
            self.root()?,
            self.share("kite", Path::new(TOP), "auto", &["--readonly"])?,
            self.fabric.part(self),
        ] {
            command.args(part.args);
            helpers.extend(part.helpers);
        }
        command.args(self.way_in());
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(self.log("qemu.log")?);
        let qemu = Guarded::spawn(command).context(|| "starting QEMU".into())?;
        Ok(Machine { qemu, helpers })
    }

    fn base(&self) -> Result<Vec<String>> {
        let memory = self.memory_mib;
        let console = self.file("console");
        let debugger = self.file("gdb");
        Ok([
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-machine",
            "q35,memory-backend=memory",
            "-m",
            &format!("{memory}M"),
            "-smp",
            &self.cpus.to_string(),
            "-object",
            &format!("memory-backend-memfd,id=memory,size={memory}M,share=on"),
            "-serial",
            &format!("file:{}", console.display()),
            // Init reads the identity of a node that starts from a snapshot here.
            "-serial",
            &format!(
                "unix:{},server=on,wait=off",
                self.identity_socket().display()
            ),
            "-device",
            "vmgenid,guid=auto",
            "-qmp",
            "stdio",
            "-gdb",
            &format!("unix:{},server=on,wait=off", debugger.display()),
            // The machine ends if the guest panics or reboots, so that the harness detects it.
            "-action",
            "reboot=shutdown",
        ]
        .map(String::from)
        .into())
    }

    /// Returns the kernel and its command line, or the firmware that boots them.
    fn boot(&self) -> Result<Vec<String>> {
        let (kernel, append) = (self.kernel.image()?, self.command_line());
        match &self.firmware {
            Some(firmware) => firmware.args(&kernel, &append),
            None => {
                let kernel = kernel.display().to_string();
                Ok(["-kernel".into(), kernel, "-append".into(), append].into())
            }
        }
    }

    /// Returns the kernel's command line. Warnings reach the console from the start. Lines of lower levels would slow
    /// the boot, so init enables them at its end. Machines share the host's processors, so timeouts of stalls are long.
    /// For the same reason the clock source watchdog would distrust the TSC: the other clocks are devices, and slow to
    /// read.
    fn command_line(&self) -> String {
        format!(
            "console=ttyS0 loglevel=5 panic=-1 mitigations=off nokaslr net.ifnames=0 \
             rcupdate.rcu_cpu_stall_timeout=60 watchdog_thresh=30 tsc=nowatchdog \
             rootfstype=virtiofs root=root {} {} {} kite_fabric={} kite_build={} {}",
            self.init(),
            self.accel.kernel_parameters(),
            self.parameters,
            self.fabric,
            self.kernel.build(),
            self.identity()
        )
    }

    /// Returns the variables of init that differ between nodes. A template has none.
    fn identity(&self) -> String {
        match self.number {
            TEMPLATE => String::new(),
            number => format!("kite_node={number} kite_dir={}", self.dir.display()),
        }
    }

    fn identity_socket(&self) -> PathBuf {
        self.file("identity")
    }

    /// Writes identity and time to init, in a machine that started from a snapshot. Waits until the terminal of init
    /// echoes the line, since QEMU drops what the machine has not read when the connection closes.
    pub(crate) fn send_identity(&self) -> Result<()> {
        let what = || format!("sending the identity of {}", self.name());
        let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        let line = format!("{} kite_time={}\n", self.identity(), now.as_secs());
        let mut socket = UnixStream::connect(self.identity_socket()).context(what)?;
        socket.set_read_timeout(Some(boot_limit())).context(what)?;
        socket.write_all(line.as_bytes()).context(what)?;
        let mut echo = String::new();
        BufReader::new(socket)
            .read_line(&mut echo)
            .map(drop)
            .context(what)
    }

    /// Returns the parameters of init. A Debian host has its own, which starts `guest/debian`.
    fn init(&self) -> String {
        match self.system {
            Some(_) => format!("rw systemd.show_status=0 {LEAN}"),
            None => format!("ro init={TOP}/tests/cluster/guest/init"),
        }
    }

    fn root(&self) -> Result<Part> {
        match &self.system {
            Some(system) => self.share("root", system, "always", &[]),
            None => self.share("root", Path::new("/"), "always", &["--readonly"]),
        }
    }

    /// Shares a directory of the host with the guest. virtiofsd gets its listening socket as standard input, so QEMU
    /// can connect at once.
    fn share(&self, tag: &str, directory: &Path, cache: &str, options: &[&str]) -> Result<Part> {
        let socket = self.file(&format!("{tag}.socket"));
        // A node that was started again left a socket.
        let _ = fs::remove_file(&socket);
        let listener =
            UnixListener::bind(&socket).context(|| format!("binding {}", socket.display()))?;
        let mut command = Command::new(VIRTIOFSD);
        command
            // A file of the checkout may be gone when a machine starts from a snapshot.
            .args([
                "--fd=0",
                "--sandbox=none",
                "--migration-on-error=guest-error",
            ])
            .args(options)
            .arg(format!("--cache={cache}"))
            .arg(format!("--shared-dir={}", directory.display()))
            .stdin(OwnedFd::from(listener))
            .stdout(Stdio::null())
            .stderr(self.log(&format!("{tag}.log"))?);
        let helper = Guarded::spawn(command).context(|| format!("starting {VIRTIOFSD}"))?;
        let args = vec![
            "-chardev".into(),
            format!("socket,id={tag},path={}", socket.display()),
            "-device".into(),
            format!("vhost-user-fs-pci,chardev={tag},tag={tag}"),
        ];
        Ok(Part {
            args,
            helpers: vec![helper],
        })
    }

    /// Returns the second network device, which forwards a port of the host to sshd, and nothing else.
    fn way_in(&self) -> [&'static str; 4] {
        [
            "-netdev",
            "user,id=ssh,restrict=on,ipv6=off,hostfwd=tcp:127.0.0.1:0-10.0.2.15:22",
            "-device",
            "virtio-net-pci,netdev=ssh,romfile=",
        ]
    }

    fn log(&self, kind: &str) -> Result<File> {
        let path = self.file(kind);
        File::create(&path).context(|| format!("creating {}", path.display()))
    }
}
