// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Devices and the network between them.
//!
//! All devices run in one thread. An access by a virtual machine takes effect at once, and [`Fabric::run`] does the
//! remaining work. The caller sets the time, so a test can advance it by any amount.

use std::io;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::cost::Statement;
use crate::device::{Device, DeviceId};
use crate::doorbell::{self, PollSchedule};
use crate::engine;
use crate::network::packet::Packet;
use crate::network::{Network, NetworkCounters, Outbox};
use crate::object::eq::Event;

/// Maximum number of packets and turns that [`Fabric::run`] handles before it returns to serve virtual machines.
const WORK: usize = 512;

/// The first LID of multicast groups.
const MULTICAST: u16 = 0xc000;

/// The upper half of a port's GID: link-local.
const SUBNET: u64 = 0xfe80 << 48;

/// Port of the network.
#[derive(Clone, Debug)]
pub struct Port {
    /// LID.
    pub lid: u16,
    /// GUID, the lower half of the GID.
    pub guid: u64,
    /// `true` if the port is up.
    pub up: bool,
}

impl Port {
    /// Returns the GID.
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
    polls: PollSchedule,
}

impl Fabric {
    /// Returns `devices` devices on one network.
    pub fn new(count: usize) -> Self {
        let device = |index| Device::new(DeviceId(index), port(index));
        Fabric {
            network: Network::default(),
            devices: (0..count).map(device).collect(),
            outbox: Outbox::default(),
            polls: PollSchedule::default(),
        }
    }

    /// Enables mapped doorbells for virtual machines that connect later. Their doorbell records are polled.
    pub fn map_doorbells(&mut self) -> io::Result<()> {
        self.devices.iter_mut().try_for_each(|device| {
            device.doorbells = Some(doorbell::create_pages()?);
            Ok(())
        })
    }

    /// Returns all devices.
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
    /// If the device does not exist.
    pub fn device(&mut self, id: DeviceId) -> &mut Device {
        &mut self.devices[id.0]
    }

    /// Returns a device and the outbox, for an access by its virtual machine.
    ///
    /// # Panics
    ///
    /// If the device does not exist.
    pub fn parts(&mut self, id: DeviceId) -> (&mut Device, &mut Outbox) {
        (&mut self.devices[id.0], &mut self.outbox)
    }

    /// Brings a port up or takes it down, and raises an event.
    ///
    /// # Panics
    ///
    /// If the device does not exist.
    pub fn set_port(&mut self, id: DeviceId, up: bool) {
        let device = &mut self.devices[id.0];
        if std::mem::replace(&mut device.port.up, up) != up && !device.dead {
            device.event(Event::Port { up });
        }
    }

    /// Delivers packets and runs turns and timers until no work is left, or until `WORK` steps are done:
    /// [`Fabric::deadline`] is then in the past. `now` is the time since the start of the fabric.
    pub fn run(&mut self, now: Duration) {
        self.outbox.now = now;
        for device in &mut self.devices {
            device.now = now;
        }
        self.poll_doorbells();
        for _ in 0..WORK {
            self.forward_packets();
            // Timers expire only if no packet is deliverable, so that a slow host causes no timeouts.
            if !self.deliver_packet() && !self.run_turns() && !self.handle_timeouts() {
                break;
            }
        }
        self.forward_packets();
    }

    /// Returns the time of the next packet, timer or poll.
    pub fn deadline(&self) -> Option<Duration> {
        let alive = self.devices.iter().filter(|device| !device.dead);
        let devices = alive.filter_map(engine::next_deadline);
        let others = self
            .network
            .deadline()
            .into_iter()
            .chain(self.polls.next_poll());
        devices.chain(others).min()
    }

    /// Polls the doorbell records of devices whose doorbells do not trap.
    fn poll_doorbells(&mut self) {
        let (mut any, mut rang) = (false, false);
        for device in self
            .devices
            .iter_mut()
            .filter(|device| doorbell::needs_polling(device))
        {
            any = true;
            rang |= doorbell::poll_records(device, &mut self.outbox);
        }
        match any {
            true => self.polls.record_poll(self.outbox.now, rang),
            false => self.polls.stop(),
        }
    }

    /// Moves packets from the outbox into the network, a multicast packet to each port. Packets of a port that is down
    /// are dropped.
    fn forward_packets(&mut self) {
        while let Some(packet) = self.outbox.take() {
            let to = packet.path.destination;
            if to < MULTICAST {
                self.send_to_port(to, packet);
                continue;
            }
            for port in 0..self.devices.len() {
                self.send_to_port(self.devices[port].port.lid, packet.clone());
            }
        }
    }

    fn send_to_port(&mut self, to: u16, packet: Packet) {
        let sender = index(packet.path.source).and_then(|index| self.devices.get_mut(index));
        let Some(sender) = sender.filter(|device| device.port.up && !device.dead) else {
            return;
        };
        let kept = self.network.accept(self.outbox.now, to, packet);
        sender.cost.count.packets_lost += u64::from(!kept);
    }

    /// Delivers one packet. Returns `false` if no packet has arrived.
    fn deliver_packet(&mut self) -> bool {
        let Some((to, packet)) = self.network.deliver(self.outbox.now) else {
            return false;
        };
        let device = index(to).and_then(|index| self.devices.get_mut(index));
        if let Some(device) = device.filter(|device| device.port.up && !device.dead) {
            engine::handle_packet(device, packet, &mut self.outbox);
        }
        true
    }

    /// Runs one turn of each device. Returns `true` if any turn was scheduled.
    fn run_turns(&mut self) -> bool {
        let mut any = false;
        for device in self.devices.iter_mut().filter(|device| !device.dead) {
            any |= engine::run_turn(device, &mut self.outbox);
        }
        any
    }

    /// Handles the expired timers of all devices. Returns `true` if any timer has expired.
    fn handle_timeouts(&mut self) -> bool {
        let mut any = false;
        for device in self.devices.iter_mut().filter(|device| !device.dead) {
            any |= engine::handle_timeouts(device, &mut self.outbox);
        }
        any
    }
}

/// Returns the port of the device `index`.
fn port(index: usize) -> Port {
    Port {
        lid: index as u16 + 1,
        guid: 0x506b_4b03_0001_0001 + index as u64,
        up: true,
    }
}

/// Returns the index of the device whose port has this LID.
fn index(lid: u16) -> Option<usize> {
    usize::from(lid).checked_sub(1)
}
