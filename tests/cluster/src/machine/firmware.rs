// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Machines that boot by UEFI with Secure Boot, with the certificate of kite's modules as a machine owner key (MOK).
//!
//! The chain is that of a Debian host: the firmware has Microsoft's keys and starts Debian's shim, which starts
//! Debian's GRUB, which starts the stock kernel with Debian's signature. The kernel trusts the certificates of the MOK
//! list for modules, and locks itself down. The list is written to the firmware's variables, as `mokutil --import` and
//! the MOK manager write it.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::Result;
use crate::machine::hosts::run;

/// OVMF whose variables only system management mode may change.
const CODE: &str = "/usr/share/OVMF/OVMF_CODE_4M.secboot.fd";

/// Makes $1/vars.fd of variables with Microsoft's keys and kite's certificate in the MOK list, and $1/esp.img with the
/// boot chain of the kernel $2, whose command line is $3.
const MAKE: &str = r#"
    vars=$1/vars.fd esp=$1/esp.img owner=5f4f7a1c-6b7e-4a0e-9b57-6b697465aa01
    openssl x509 -inform DER -in /etc/kite-signing/cert.der -out "$1/cert.pem"
    virt-fw-vars --input /usr/share/OVMF/OVMF_VARS_4M.ms.fd --output "$vars" --add-mok $owner "$1/cert.pem"
    printf 'linux /linux %s\nboot\n' "$3" >"$1/grub.cfg"
    rm -f "$esp"
    truncate -s 64M "$esp"
    mkfs.vfat "$esp" >/dev/null
    mmd -i "$esp" ::EFI ::EFI/BOOT ::EFI/debian
    mcopy -i "$esp" /usr/lib/shim/shimx64.efi.signed ::EFI/BOOT/BOOTX64.EFI
    mcopy -i "$esp" /usr/lib/grub/x86_64-efi-signed/grubx64.efi.signed ::EFI/BOOT/grubx64.efi
    mcopy -i "$esp" "$1/grub.cfg" ::EFI/debian/grub.cfg
    mcopy -i "$esp" "$2" ::linux
"#;

/// Firmware of a machine, with variables and a boot disk of its own.
#[derive(Clone, Debug)]
pub(crate) struct Firmware {
    dir: PathBuf,
}

impl Firmware {
    /// Firmware with its files in the cluster's directory `dir`.
    pub(crate) fn new(dir: &Path) -> Self {
        Firmware { dir: dir.into() }
    }

    /// Makes the variables and the boot disk. Returns the arguments of QEMU that boot `kernel`.
    pub(crate) fn args(&self, kernel: &Path, command_line: &str) -> Result<Vec<String>> {
        let mut command = Command::new("bash");
        command.args(["-euc", MAKE, "bash"]).arg(&self.dir);
        command.arg(kernel).arg(command_line);
        run(command, || "making firmware and boot disk".into())?;
        let drive = |options: &str, file: &Path| {
            let drive = format!("{options},format=raw,file={}", file.display());
            ["-drive".to_string(), drive]
        };
        let secure = [
            "-machine",
            "smm=on",
            "-global",
            "driver=cfi.pflash01,property=secure,value=on",
        ];
        let drives = [
            drive("if=pflash,unit=0,readonly=on", Path::new(CODE)),
            drive("if=pflash,unit=1", &self.dir.join("vars.fd")),
            drive("if=virtio", &self.dir.join("esp.img")),
        ];
        let secure = secure.into_iter().map(String::from);
        Ok(secure.chain(drives.into_iter().flatten()).collect())
    }
}
