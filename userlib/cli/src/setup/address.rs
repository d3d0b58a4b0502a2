// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Addresses of kited on the command line.

use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU16;

use anyhow::{ensure, Context, Result};

/// Port of the seed if none is given.
pub(super) const DEFAULT_PORT: u16 = 7471;

/// Adds the default port to a host name or an IP address that has no port.
pub(super) fn with_port(text: &str) -> Result<String> {
    if text.parse::<SocketAddr>().is_ok() {
        return Ok(text.into());
    }
    if let Ok(ip) = text.trim_matches(['[', ']']).parse::<IpAddr>() {
        return Ok(SocketAddr::new(ip, DEFAULT_PORT).to_string());
    }
    let Some((host, port)) = text.split_once(':') else {
        ensure!(needs_no_quoting(text), "invalid host: {text}");
        return Ok(format!("{text}:{DEFAULT_PORT}"));
    };
    ensure!(needs_no_quoting(host), "invalid host: {host}");
    let port: NonZeroU16 = port
        .parse()
        .with_context(|| format!("invalid port: {port}"))?;
    Ok(format!("{host}:{port}"))
}

/// Returns `true` if a word needs no quoting in the environment file of a systemd unit.
pub(super) fn needs_no_quoting(word: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    !word.is_empty() && !word.starts_with('-') && word.chars().all(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_without_port_gets_the_default_port() {
        for (text, full) in [
            ("seed", "seed:7471"),
            ("seed.rack-1:80", "seed.rack-1:80"),
            ("10.0.0.1", "10.0.0.1:7471"),
            ("10.0.0.1:80", "10.0.0.1:80"),
            ("fd00::1", "[fd00::1]:7471"),
            ("[fd00::1]", "[fd00::1]:7471"),
            ("[::]:80", "[::]:80"),
        ] {
            assert_eq!(with_port(text).unwrap(), full);
        }
    }

    #[test]
    fn address_with_invalid_characters_or_port_is_rejected() {
        for text in [
            "", ":80", "a b", "a'", "-v", "a:0", "a:x", "a:70000", "$a", "a\n",
        ] {
            assert!(with_port(text).is_err(), "{text:?}");
        }
    }
}
