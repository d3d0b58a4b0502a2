// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Network and RNIC of a node: links, losses, delays, removal, counters.

use std::time::Duration;

use serde_json::json;

use crate::error::{Error, Result};
use crate::fabric::connectx::Connectx;
use crate::fabric::LINK;
use crate::node::Node;

/// Maximum time of the removal of an RNIC, also under load.
const REMOVAL: Duration = Duration::from_secs(30);

impl Node {
    /// Makes the RNIC reject the next `times` creations of a DCT.
    pub fn refuse_targets(&self, times: u32) -> Result<()> {
        self.connectx()?.refuse_targets(self.plan.number, times)
    }

    /// Lets the DCTs of the RNIC complete their drains, or not.
    pub fn hold_targets(&self, hold: bool) -> Result<()> {
        self.connectx()?.hold_targets(self.plan.number, hold)
    }

    /// Takes down the link of the private network, and that of the RNIC if it has its own.
    pub fn disconnect(&self) -> Result<()> {
        self.set_links(false)
    }

    /// Takes down the link of the RNIC, and leaves that of the private network up.
    ///
    /// # Errors
    ///
    /// [`Error::NotConnectx`]: other RNICs have no link of their own.
    pub fn disconnect_rnic(&self) -> Result<()> {
        self.connectx()?.set_port(self.plan.number, false)
    }

    /// Takes down the link of the private network, and leaves that of the RNIC up.
    ///
    /// # Errors
    ///
    /// [`Error::NotConnectx`]: other RNICs have no link of their own.
    pub fn disconnect_network(&self) -> Result<()> {
        self.connectx()?;
        self.qmp("set_link", json!({ "name": LINK, "up": false }))
    }

    /// Brings the links up again.
    pub fn reconnect(&self) -> Result<()> {
        self.set_links(true)
    }

    /// Undoes `disconnect` of an earlier test, and that part of `loss` that is outside the node.
    pub(crate) fn restore_links(&self) -> Result<()> {
        if let Some(connectx) = &self.network {
            connectx.lose(self.plan.number, 0.0)?;
        }
        self.reconnect()
    }

    fn set_links(&self, up: bool) -> Result<()> {
        if let Some(connectx) = &self.network {
            connectx.set_port(self.plan.number, up)?;
        }
        self.qmp("set_link", json!({ "name": LINK, "up": up }))
    }

    /// Returns the name of its RNIC.
    pub fn rnic(&self) -> Result<String> {
        self.sh("cd /sys/class/infiniband && echo *")
    }

    /// Removes the RNIC from the node, also while it is in use. [`Node::start_kite`] restores it.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`] after 30 s.
    pub fn remove_rnic(&self) -> Result<()> {
        let removal = self.command(self.plan.fabric.removal()).limit(REMOVAL);
        removal.sh().map(drop)
    }

    /// Makes the RNIC fail as hardware does: it sends no packets, and its registers read as ones.
    ///
    /// # Errors
    ///
    /// [`Error::NotConnectx`]: the RNIC is no software ConnectX.
    pub fn kill_rnic(&self) -> Result<()> {
        self.connectx()?.kill(self.plan.number)
    }

    /// Resets a failed RNIC to its state after power-on.
    ///
    /// # Errors
    ///
    /// [`Error::NotConnectx`]: the RNIC is no software ConnectX.
    pub fn revive_rnic(&self) -> Result<()> {
        self.connectx()?.revive(self.plan.number)
    }

    /// Removes the RNIC from the node without notice: from now on its registers read as ones. [`Node::remove_rnic`]
    /// then removes the device from the kernel.
    ///
    /// # Errors
    ///
    /// [`Error::NotConnectx`]: the RNIC is no software ConnectX.
    pub fn pull_rnic(&self) -> Result<()> {
        self.connectx()?.pull(self.plan.number)
    }

    /// Gives the RNIC a cache of `entries` page translations, and resets its counters.
    ///
    /// # Errors
    ///
    /// [`Error::NotConnectx`]: the RNIC is no software ConnectX.
    pub fn cache_translations(&self, entries: usize) -> Result<()> {
        self.connectx()?
            .cache_translations(self.plan.number, entries)
    }

    /// Returns the page translations that the RNIC has missed in its cache.
    ///
    /// # Errors
    ///
    /// [`Error::NotConnectx`]: the RNIC is no software ConnectX.
    pub fn missed_translations(&self) -> Result<u64> {
        self.connectx()?.missed_translations(self.plan.number)
    }

    /// Returns counters of its RNIC, by their names in the `stats` reply of the software ConnectX.
    ///
    /// # Errors
    ///
    /// - [`Error::NotConnectx`]: the RNIC is no software ConnectX.
    /// - [`Error::Control`]: the counter does not exist.
    pub fn rnic_counts<const N: usize>(&self, names: [&str; N]) -> Result<[u64; N]> {
        self.connectx()?.counts(self.plan.number, names)
    }

    fn connectx(&self) -> Result<&Connectx> {
        self.network.as_deref().ok_or(Error::NotConnectx)
    }

    /// Drops this share of the frames and RDMA packets that the node sends. 0 ends the loss.
    pub fn loss(&self, percent: f64) -> Result<()> {
        if let Some(connectx) = &self.network {
            connectx.lose(self.plan.number, percent / 100.0)?;
        }
        let line = match percent > 0.0 {
            // `guest/start-kite` ends the loss if the file exists.
            true => format!(
                "touch /run/kite/lossy; tc qdisc replace dev eth0 root netem loss {percent}%"
            ),
            false => "tc qdisc del dev eth0 root 2>&1 || true".into(),
        };
        self.sh(&line)?;
        Ok(())
    }

    /// Delays the packets of its software ConnectX to that of another node, until the turn of another test. Ends losses
    /// by chance.
    pub fn delay(&self, to: &Node, by: Duration) -> Result<()> {
        self.connectx()?.delay(self.plan.number, to.plan.number, by)
    }

    /// Delays the packets of the software ConnectXs of all nodes, until the turn of another test. Ends losses by chance.
    pub fn delay_all(&self, by: Duration) -> Result<()> {
        self.connectx()?.delay_all(by)
    }

    /// Returns the RDMA packets lost since [`Node::loss`] was called. On Soft-RoCE these are frames.
    pub fn lost(&self) -> Result<u64> {
        if let Some(connectx) = &self.network {
            return connectx.lost(self.plan.number);
        }
        let count =
            self.sh("tc -s qdisc show dev eth0 | sed -n 's/.*(dropped \\([0-9]*\\),.*/\\1/p'")?;
        Ok(count.parse().expect(&count))
    }
}
