// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Machines that boot by UEFI with Secure Boot, and trust the certificate of kite's modules.
//!
//! The certificate is the platform key, the key exchange key and in `db`, so the firmware starts a kernel
//! that was signed with kite's key. The kernel then trusts the certificates of `db` for modules, and locks
//! itself down.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::Result;
use crate::hosts::run;

/// OVMF that only system management mode may change.
const CODE: &str = "/usr/share/OVMF/OVMF_CODE_4M.secboot.fd";

/// Signs the kernel $1 as $2/linux.efi, and makes $2/vars.fd of empty variables and kite's certificate.
const ENROL: &str = r#"
    keys=/etc/kite-signing owner=5f4f7a1c-6b7e-4a0e-9b57-6b697465aa01
    openssl x509 -inform DER -in $keys/cert.der -out "$2/cert.pem"
    sbsign --key $keys/key.pem --cert "$2/cert.pem" --output "$2/linux.efi" "$1"
    virt-fw-vars --input /usr/share/OVMF/OVMF_VARS_4M.fd --output "$2/vars.fd" --secure-boot \
        --set-pk $owner "$2/cert.pem" --add-kek $owner "$2/cert.pem" --add-db $owner "$2/cert.pem"
"#;

/// Firmware of a machine, with variables of its own.
#[derive(Clone, Debug)]
pub(crate) struct Firmware {
    dir: PathBuf,
}

impl Firmware {
    /// Enrols kite's certificate and signs `kernel`, with files in the cluster's directory `dir`.
    pub(crate) fn enrolled(dir: &Path, kernel: &Path) -> Result<Self> {
        let mut command = Command::new("bash");
        command.args(["-euc", ENROL, "bash"]).arg(kernel).arg(dir);
        run(command, || "enrolling kite's certificate".into())?;
        Ok(Firmware { dir: dir.into() })
    }

    /// The signed kernel.
    pub(crate) fn kernel(&self) -> PathBuf {
        self.dir.join("linux.efi")
    }

    pub(crate) fn args(&self) -> Vec<String> {
        let vars = self.dir.join("vars.fd");
        [
            "-machine".into(),
            "smm=on".into(),
            "-global".into(),
            "driver=cfi.pflash01,property=secure,value=on".into(),
            "-drive".into(),
            format!("if=pflash,unit=0,format=raw,readonly=on,file={CODE}"),
            "-drive".into(),
            format!("if=pflash,unit=1,format=raw,file={}", vars.display()),
        ]
        .into()
    }
}
