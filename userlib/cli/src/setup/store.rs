// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Store of a cluster on the command line. kited checks the URL and the files when it starts.

use std::path::Path;

use anyhow::{ensure, Result};

use crate::args::StoreArgs;

/// Returns the options of kited for a store, or `None` without a store.
///
/// # Errors
/// If a word would need quoting in the environment file of the unit, or a path is relative.
pub(super) fn kited_options(args: &StoreArgs) -> Result<Option<String>> {
    let Some(url) = &args.store else {
        return Ok(None);
    };
    let is_url = url.starts_with("etcd://") || url.starts_with("etcds://");
    ensure!(is_url && is_plain(url), "invalid URL of a store: {url}");
    let mut options = format!("--store {url}");
    for (option, file) in [
        ("--store-ca", &args.store_ca),
        ("--store-cert", &args.store_cert),
        ("--store-key", &args.store_key),
    ] {
        if let Some(file) = file {
            options += &format!(" {option} {}", plain_path(file)?);
        }
    }
    Ok(Some(options))
}

/// Returns an absolute path that needs no quoting.
fn plain_path(path: &Path) -> Result<&str> {
    let text = path.to_str().filter(|text| is_plain(text));
    let text = text.filter(|_| path.is_absolute());
    text.ok_or_else(|| {
        anyhow::anyhow!(
            "path must be absolute, without blanks and quotes: {}",
            path.display()
        )
    })
}

/// Returns `true` if a URL or a path needs no quoting in the environment file of a systemd unit.
fn is_plain(word: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/:,.-_[]".contains(c);
    word.chars().all(is_plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(url: &str, ca: Option<&str>) -> StoreArgs {
        StoreArgs {
            store: Some(url.into()),
            store_ca: ca.map(Into::into),
            ..StoreArgs::default()
        }
    }

    #[test]
    fn options_that_need_no_quoting_are_accepted() {
        let options = |url, ca| kited_options(&args(url, ca)).unwrap().unwrap();
        assert_eq!(
            options("etcd://a:1,[fd00::1]:2/x", None),
            "--store etcd://a:1,[fd00::1]:2/x"
        );
        assert_eq!(
            options("etcds://a:1", Some("/etc/kite/ca.pem")),
            "--store etcds://a:1 --store-ca /etc/kite/ca.pem"
        );
        assert_eq!(kited_options(&StoreArgs::default()).unwrap(), None);
    }

    #[test]
    fn other_urls_and_paths_are_rejected() {
        for (url, ca) in [
            ("a:1", None),
            ("http://a:1", None),
            ("etcd://a:1 --insecure", None),
            ("etcd://$a", None),
            ("etcds://a:1", Some("ca.pem")),
            ("etcds://a:1", Some("/etc/my ca.pem")),
        ] {
            assert!(kited_options(&args(url, ca)).is_err(), "{url} {ca:?}");
        }
    }
}
