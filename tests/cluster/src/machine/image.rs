// SPDX-License-Identifier: GPL-2.0 OR MIT
//! A machine that boots a disk image by UEFI, as a user of the image would. No part of a cluster is added.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::error::{Context, Result};
use crate::machine::accel::Accel;
use crate::machine::guarded::Guarded;
use crate::machine::qemu;
use crate::report::console::Console;
use crate::wait::until;
use crate::TOP;

const FIRMWARE: &str = "/usr/share/ovmf/OVMF.fd";

/// A running machine. The image is not modified. Dropping the machine kills it.
#[derive(Debug)]
pub struct ImageMachine {
    // Killed with the machine.
    _qemu: Guarded,
    console: Console,
}

impl ImageMachine {
    /// Starts a machine of 1 GiB with a disk image. The console is in `target/cluster/image.console`.
    ///
    /// # Errors
    ///
    /// [`Error::Io`](crate::Error::Io): QEMU cannot be started.
    pub fn boot(image: &str) -> Result<Self> {
        let dir = Path::new(TOP).join("target/cluster");
        fs::create_dir_all(&dir).context(|| format!("creating {}", dir.display()))?;
        let log = dir.join("image.console");
        let _ = fs::remove_file(&log);
        let mut command = Command::new(qemu::PROGRAM);
        command
            .args(["-nodefaults", "-display", "none", "-machine", "q35"])
            .args(Accel::detect()?.args())
            .args(["-m", "1G", "-bios", FIRMWARE])
            .args(["-nic", "user,model=virtio-net-pci,restrict=on"])
            .args(["-drive", &format!("file={image},if=virtio,snapshot=on")])
            .args(["-serial", &format!("file:{}", log.display())])
            .stdin(Stdio::null());
        let qemu = Guarded::spawn(command).context(|| "starting QEMU".into())?;
        Ok(Self {
            _qemu: qemu,
            console: Console::new(log),
        })
    }

    /// Waits until the console contains `text`. Returns the whole console.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`](crate::Error::Timeout) after `limit`.
    pub fn await_console(&self, text: &str, limit: Duration) -> Result<String> {
        until(text, limit, || Ok(self.console.since(0).contains(text)))?;
        Ok(self.console.since(0))
    }
}
