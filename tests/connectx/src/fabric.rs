// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Devices and the network between them.
//!
//! All devices run in one thread: an access by a machine takes effect at once, and [`Fabric::run`] continues from
//! there. The caller sets the time, so a test can let hours pass.

use std::io;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::cost::Statement;
use crate::device::{Device, DeviceId};
use crate::doorbell::{self, Pace};
use crate::engine;
use crate::network::packet::Packet;
use crate::network::{Network, NetworkCounters, Outbox};
use crate::object::eq::Event;

/// Maximum number of packets and turns that [`Fabric::run`] handles before it returns to serve machines.
const WORK: usize = 512;

/// The first LID of multicast groups.
const MULTICAST: u16 = 0xc000;

/// The upper half of a port's GID: link-local.
const SUBNET: u64 = 0xfe80 << 48;

/// A port of the network.
#[derive(Clone, Debug)]
pub struct Port {
    /// Its local identifier.
    pub lid: u16,
    /// Its GUID, the lower half of its GID.
    pub guid: u64,
    /// `true` if the port is up.
    pub up: bool,
}

impl Port {
    /// Its GID.
    pub fn gid(&self) -> [u8; 16] {
        ((u128::from(SUBNET) << 64) | u128::from(self.guid)).to_be_bytes()
    }
}

/// Statistics of the devices and the network.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Account {
    /// The network.
    pub network: NetworkCounters,
    /// The devices, in order.
    pub devices: Vec<Statement>,
}

/// Devices and the network between them.
#[derive(Debug)]
pub struct Fabric {
    /// The network.
    pub network: Network,
    devices: Vec<Device>,
    outbox: Outbox,
    pace: Pace,
}

impl Fabric {
    /// So many devices, on one network.
    pub fn new(count: usize) -> Self {
        let device = |index| Device::new(DeviceId(index), port(index));
        Fabric {
            network: Network::default(),
            devices: (0..count).map(device).collect(),
            outbox: Outbox::default(),
            pace: Pace::default(),
        }
    }

    /// Lets machines that have still to come map their doorbells, which then have to be looked for.
    pub fn map_doorbells(&mut self) -> io::Result<()> {
        self.devices.iter_mut().try_for_each(|device| {
            device.doorbells = Some(doorbell::pages()?);
            Ok(())
        })
    }

    /// All devices.
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// Returns the statistics of all devices and the network so far.
    pub fn account(&self) -> Account {
        let devices = self.devices.iter();
        let statements =
            devices.map(|device| device.cost.statement(&device.dma, &device.interrupts));
        Account {
            network: self.network.count(),
            devices: statements.collect(),
        }
    }

    /// A device.
    ///
    /// # Panics
    ///
    /// If there is no such device.
    pub fn device(&mut self, id: DeviceId) -> &mut Device {
        &mut self.devices[id.0]
    }

    /// A device, and where its packets go, for what the machine does to it.
    ///
    /// # Panics
    ///
    /// If there is no such device.
    pub fn parts(&mut self, id: DeviceId) -> (&mut Device, &mut Outbox) {
        (&mut self.devices[id.0], &mut self.outbox)
    }

    /// Brings a port up or takes it down, and raises an event.
    ///
    /// # Panics
    ///
    /// If there is no such device.
    pub fn set_port(&mut self, id: DeviceId, up: bool) {
        let device = &mut self.devices[id.0];
        if std::mem::replace(&mut device.port.up, up) != up && !device.dead {
            device.event(Event::Port { up });
        }
    }

    /// Delivers packets and lets queue pairs go on until there is nothing to do, or a good deal is done:
    /// then [`Fabric::deadline`] is past. `now` is the time since the fabric began.
    pub fn run(&mut self, now: Duration) {
        self.outbox.now = now;
        for device in &mut self.devices {
            device.now = now;
        }
        self.look();
        for _ in 0..WORK {
            self.collect();
            // Time is up only for what is not on its way: a slow host is not a slow network.
            if !self.deliver() && !self.take_turns() && !self.time_out() {
                break;
            }
        }
        self.collect();
    }

    /// When there will be something to do, if nothing else happens.
    pub fn deadline(&self) -> Option<Duration> {
        let alive = self.devices.iter().filter(|device| !device.dead);
        let devices = alive.filter_map(engine::next_deadline);
        let others = self.network.deadline().into_iter().chain(self.pace.next());
        devices.chain(others).min()
    }

    /// Polls the doorbell records of devices whose doorbells do not trap.
    fn look(&mut self) {
        let (mut any, mut rang) = (false, false);
        for device in self
            .devices
            .iter_mut()
            .filter(|device| doorbell::is_watched(device))
        {
            any = true;
            rang |= doorbell::look(device, &mut self.outbox);
        }
        match any {
            true => self.pace.looked(self.outbox.now, rang),
            false => self.pace.rest(),
        }
    }

    /// Moves what devices have sent into the network: a multicast packet to each port. What leaves by a port
    /// that is down is lost.
    fn collect(&mut self) {
        while let Some(packet) = self.outbox.take() {
            let to = packet.path.destination;
            if to < MULTICAST {
                self.send(to, packet);
                continue;
            }
            for port in 0..self.devices.len() {
                self.send(self.devices[port].port.lid, packet.clone());
            }
        }
    }

    fn send(&mut self, to: u16, packet: Packet) {
        let sender = index(packet.path.source).and_then(|index| self.devices.get_mut(index));
        let Some(sender) = sender.filter(|device| device.port.up && !device.dead) else {
            return;
        };
        let kept = self.network.accept(self.outbox.now, to, packet);
        sender.cost.count.packets_lost += u64::from(!kept);
    }

    /// Delivers one packet. Returns whether there was one.
    fn deliver(&mut self) -> bool {
        let Some((to, packet)) = self.network.deliver(self.outbox.now) else {
            return false;
        };
        let device = index(to).and_then(|index| self.devices.get_mut(index));
        if let Some(device) = device.filter(|device| device.port.up && !device.dead) {
            engine::handle_packet(device, packet, &mut self.outbox);
        }
        true
    }

    /// Lets one queue pair of each device go on. Returns whether there was any.
    fn take_turns(&mut self) -> bool {
        let mut any = false;
        for device in self.devices.iter_mut().filter(|device| !device.dead) {
            any |= engine::run_turn(device, &mut self.outbox);
        }
        any
    }

    /// Lets all do what is due by now. Returns whether anything was.
    fn time_out(&mut self) -> bool {
        let mut any = false;
        for device in self.devices.iter_mut().filter(|device| !device.dead) {
            any |= engine::handle_timeouts(device, &mut self.outbox);
        }
        any
    }
}

/// The port of a device.
fn port(index: usize) -> Port {
    Port {
        lid: index as u16 + 1,
        guid: 0x506b_4b03_0001_0001 + index as u64,
        up: true,
    }
}

/// The device whose port has this LID.
fn index(lid: u16) -> Option<usize> {
    usize::from(lid).checked_sub(1)
}
