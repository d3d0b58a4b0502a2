// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Encryption of the values of a store.
//!
//! A value is encrypted with XChaCha20-Poly1305, a random nonce, and a key that is derived from the key of the cluster.
//! The name of the value is authenticated with it: a value that was moved to another name cannot be read. A client with
//! write access to the store can delete values and restore earlier ones, but cannot forge or read them.
//!
//! A value begins with its form and the version of the daemons' protocol. A daemon of another version cannot read it.

use anyhow::{anyhow, bail, ensure, Context, Result};
use chacha20poly1305::aead::{Aead, Payload};
use chacha20poly1305::{KeyInit, XChaCha20Poly1305, XNonce};
use serde::de::DeserializeOwned;
use serde::Serialize;

use crate::key::Key;
use crate::wire::PROTOCOL_VERSION;

/// Purpose of the derived key.
const PURPOSE: &[u8] = b"kite store";

const NONCE_BYTES: usize = 24;

/// First byte of a value without encryption.
const PLAIN: u8 = 0;

/// First byte of an encrypted value.
const SEALED: u8 = 1;

/// Cipher of the values, or none without a key.
#[derive(Clone)]
pub(super) struct Seal(Option<XChaCha20Poly1305>);

impl Seal {
    pub(super) fn new(key: Option<&Key>) -> Self {
        Self(key.map(|key| XChaCha20Poly1305::new(&key.derive(PURPOSE).into())))
    }

    /// Encodes and encrypts a value.
    pub(super) fn seal(&self, name: &str, value: &impl Serialize) -> Result<Vec<u8>> {
        let encoded = postcard::to_stdvec(value)?;
        let Some(cipher) = &self.0 else {
            return Ok([&[PLAIN, PROTOCOL_VERSION], &encoded[..]].concat());
        };
        let mut nonce = [0; NONCE_BYTES];
        getrandom::fill(&mut nonce).context("cannot read random bytes")?;
        let payload = Payload {
            msg: &encoded,
            aad: name.as_bytes(),
        };
        let sealed = cipher.encrypt(XNonce::from_slice(&nonce), payload);
        let sealed = sealed.map_err(|_| anyhow!("cannot encrypt {name}"))?;
        Ok([&[SEALED, PROTOCOL_VERSION], &nonce[..], &sealed].concat())
    }

    /// Decrypts and decodes a value.
    pub(super) fn open<T: DeserializeOwned>(&self, name: &str, bytes: &[u8]) -> Result<T> {
        let [form, version, rest @ ..] = bytes else {
            bail!("{name} is too short");
        };
        ensure!(
            *version == PROTOCOL_VERSION,
            "{name} has protocol version {version}, this node has version {PROTOCOL_VERSION}: install the same version \
             on all nodes"
        );
        let encoded = match (*form, &self.0) {
            (PLAIN, None) => rest.to_vec(),
            (SEALED, Some(cipher)) => decrypt(cipher, name, rest)?,
            (PLAIN, Some(_)) => bail!("{name} is not encrypted: another daemon has no --key"),
            (SEALED, None) => bail!("{name} is encrypted: start kited with --key"),
            _ => bail!("{name} has an unknown form"),
        };
        postcard::from_bytes(&encoded).with_context(|| format!("{name} is malformed"))
    }
}

fn decrypt(cipher: &XChaCha20Poly1305, name: &str, sealed: &[u8]) -> Result<Vec<u8>> {
    ensure!(sealed.len() >= NONCE_BYTES, "{name} is too short");
    let (nonce, msg) = sealed.split_at(NONCE_BYTES);
    let payload = Payload {
        msg,
        aad: name.as_bytes(),
    };
    let opened = cipher.decrypt(XNonce::from_slice(nonce), payload);
    opened.map_err(|_| anyhow!("{name} cannot be decrypted: another daemon has another key"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seal(key: Option<&str>) -> Seal {
        let key = key.map(|text| Key::new(text.as_bytes()));
        Seal::new(key.as_ref())
    }

    #[test]
    fn value_is_read_with_the_same_key_and_name_only() {
        for key in [None, Some("a")] {
            let sealed = seal(key).seal("x", &42u32).unwrap();
            assert_eq!(seal(key).open::<u32>("x", &sealed).unwrap(), 42);
            assert!(seal(Some("b")).open::<u32>("x", &sealed).is_err());
        }
        let sealed = seal(Some("a")).seal("x", &42u32).unwrap();
        assert!(seal(Some("a")).open::<u32>("y", &sealed).is_err());
        assert!(seal(None).open::<u32>("x", &sealed).is_err());
    }

    #[test]
    fn value_of_another_protocol_version_is_rejected_with_both_versions() {
        for key in [None, Some("a")] {
            let mut sealed = seal(key).seal("x", &42u32).unwrap();
            sealed[1] -= 1;
            let error = seal(key).open::<u32>("x", &sealed).unwrap_err().to_string();
            let other = PROTOCOL_VERSION - 1;
            for version in [other, PROTOCOL_VERSION] {
                assert!(error.contains(&format!("version {version}")), "{error}");
            }
        }
    }

    #[test]
    fn changed_value_is_rejected() {
        let seal = seal(Some("a"));
        let sealed = seal.seal("x", &[7u8; 5]).unwrap();
        for index in 0..sealed.len() {
            let mut changed = sealed.clone();
            changed[index] ^= 4;
            assert!(seal.open::<[u8; 5]>("x", &changed).is_err(), "byte {index}");
            assert!(seal.open::<[u8; 5]>("x", &sealed[..index]).is_err());
        }
    }
}
