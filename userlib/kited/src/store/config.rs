// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Location of a store, and the certificates of its connections.

use std::fs;
use std::net::{IpAddr, UdpSocket};
use std::path::Path;

use anyhow::{bail, ensure, Context, Result};
use etcd_client::{Certificate, Identity, TlsOptions};

/// Prefix of the keys, if the URL has none.
const DEFAULT_PREFIX: &str = "kite";

/// Location of a store.
#[derive(Clone, Debug)]
pub struct StoreConfig {
    /// `HOST:PORT` of each member of the store.
    hosts: Vec<String>,
    /// Prefix of all keys.
    pub(super) prefix: String,
    /// `true` if the URL requires TLS.
    is_secure: bool,
    pub(super) tls: Option<TlsOptions>,
}

impl StoreConfig {
    /// Parses the URL of a store: `etcd://HOST:PORT,…[/PREFIX]`, or `etcds://…` for TLS.
    ///
    /// # Errors
    /// If the URL has another form.
    pub fn parse(url: &str) -> Result<Self> {
        let (is_secure, rest) = match url.split_once("://") {
            Some(("etcd", rest)) => (false, rest),
            Some(("etcds", rest)) => (true, rest),
            _ => bail!("the URL of a store begins with etcd:// or etcds://"),
        };
        let (hosts, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let hosts: Vec<String> = hosts.split(',').map(str::to_owned).collect();
        for host in &hosts {
            let port = host.rsplit_once(':').map(|(_, port)| port.parse::<u16>());
            ensure!(matches!(port, Some(Ok(_))), "{host:?} is not HOST:PORT");
        }
        let prefix = prefix.trim_matches('/');
        let prefix = if prefix.is_empty() {
            DEFAULT_PREFIX
        } else {
            prefix
        };
        Ok(Self {
            hosts,
            prefix: prefix.to_owned(),
            is_secure,
            tls: None,
        })
    }

    /// Returns a store without members, whose connections end at once.
    #[cfg(test)]
    pub(crate) fn without_hosts() -> Self {
        Self {
            hosts: Vec::new(),
            prefix: String::new(),
            is_secure: false,
            tls: None,
        }
    }

    /// Sets the files of TLS, in the PEM format: the certificate of the authority of the store, and certificate and
    /// private key of this client.
    ///
    /// # Errors
    /// If a file cannot be read, or the URL and the files do not both require TLS.
    pub fn with_tls(mut self, ca: Option<&Path>, identity: Option<(&Path, &Path)>) -> Result<Self> {
        let Some(ca) = ca else {
            ensure!(!self.is_secure, "etcds:// needs --store-ca");
            return Ok(self);
        };
        ensure!(self.is_secure, "--store-ca needs a URL with etcds://");
        let mut tls = TlsOptions::new().ca_certificate(Certificate::from_pem(read(ca)?));
        if let Some((certificate, key)) = identity {
            tls = tls.identity(Identity::from_pem(read(certificate)?, read(key)?));
        }
        self.tls = Some(tls);
        Ok(self)
    }

    /// Returns the URLs of the members of the store.
    pub(super) fn endpoints(&self) -> Vec<String> {
        let scheme = if self.is_secure { "https" } else { "http" };
        let hosts = self.hosts.iter();
        hosts.map(|host| format!("{scheme}://{host}")).collect()
    }

    /// Returns the addresses from which this host reaches the members of the store.
    pub(super) fn local_addresses(&self) -> Vec<IpAddr> {
        let local_address = |host: &String| {
            let socket = UdpSocket::bind("[::]:0").or_else(|_| UdpSocket::bind("0.0.0.0:0"));
            let socket = socket.ok()?;
            // UDP sends nothing here: the kernel only selects the source address.
            socket.connect(host).ok()?;
            Some(socket.local_addr().ok()?.ip().to_canonical())
        };
        self.hosts.iter().filter_map(local_address).collect()
    }
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn url_has_hosts_and_an_optional_prefix() {
        for (url, endpoints, prefix) in [
            ("etcd://a:1", vec!["http://a:1"], "kite"),
            (
                "etcds://a:1,10.0.0.1:2/x/y/",
                vec!["https://a:1", "https://10.0.0.1:2"],
                "x/y",
            ),
            ("etcd://[::1]:2379/p", vec!["http://[::1]:2379"], "p"),
        ] {
            let config = StoreConfig::parse(url).unwrap();
            assert_eq!(config.endpoints(), endpoints, "{url}");
            assert_eq!(config.prefix, prefix, "{url}");
        }
    }

    #[test]
    fn url_of_another_form_is_rejected() {
        for url in [
            "a:1",
            "http://a:1",
            "etcd://",
            "etcd://a",
            "etcd://a:1,",
            "etcd://a:x",
        ] {
            assert!(StoreConfig::parse(url).is_err(), "{url}");
        }
    }

    #[test]
    fn tls_requires_both_the_scheme_and_the_authority() {
        let file = Path::new("/dev/null");
        let parse = |url| StoreConfig::parse(url).unwrap();
        assert!(parse("etcds://a:1").with_tls(None, None).is_err());
        assert!(parse("etcd://a:1").with_tls(Some(file), None).is_err());
        assert!(parse("etcd://a:1").with_tls(None, None).is_ok());
        assert!(parse("etcds://a:1").with_tls(Some(file), None).is_ok());
    }
}
