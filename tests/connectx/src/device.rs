// SPDX-License-Identifier: GPL-2.0 OR MIT
//! One RNIC: all its parts. Functions take the parts that they need; what needs most of them takes the
//! device.

use std::fs::File;
use std::time::Duration;

use crate::bar::BarState;
use crate::cache::CacheConfig;
use crate::cost::{Cost, DeviceCounters};
use crate::engine::EngineState;
use crate::fabric::Port;
use crate::firmware::FirmwareState;
use crate::interrupts::Interrupts;
use crate::memory::Dma;
use crate::object::cq::Completion;
use crate::object::eq::Event;
use crate::object::{cq, eq, Objects};
use crate::pci::PciConfig;

/// The number of a device in its fabric, from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceId(pub usize);

/// An RNIC.
#[derive(Debug)]
pub struct Device {
    /// Which of the fabric's it is.
    pub id: DeviceId,
    /// Its configuration space.
    pub pci: PciConfig,
    /// State of BAR 0.
    pub bar: BarState,
    /// File that the machine maps in place of UAR pages; `None` if writes there are trapped.
    pub doorbells: Option<File>,
    /// `true` if the device has no dynamically connected transport.
    pub without_dc: bool,
    /// Targets of DC that it will refuse to make.
    pub refused_targets: u32,
    /// The machine's memory.
    pub dma: Dma,
    /// Its MSI-X vectors.
    pub interrupts: Interrupts,
    /// State of the firmware between commands.
    pub firmware: FirmwareState,
    /// All that the driver created.
    pub objects: Objects,
    /// Its place in the network.
    pub port: Port,
    /// Pending work of the engines.
    pub engine: EngineState,
    /// Dynamic connections made so far, also before resets: targets elsewhere know their numbers.
    pub connections: u64,
    /// The time, since the fabric began.
    pub now: Duration,
    /// `true` if the device has failed: registers read as ones, and doorbells have no effect.
    pub dead: bool,
    /// Cost of the device's work in hardware.
    pub cost: Cost,
}

impl Device {
    /// A device as after power-on.
    pub fn new(id: DeviceId, port: Port) -> Self {
        Device {
            id,
            pci: PciConfig::default(),
            bar: BarState::default(),
            doorbells: None,
            without_dc: false,
            refused_targets: 0,
            dma: Dma::default(),
            interrupts: Interrupts::default(),
            firmware: FirmwareState::default(),
            objects: Objects::default(),
            port,
            engine: EngineState::default(),
            connections: 0,
            now: Duration::ZERO,
            dead: false,
            cost: Cost::default(),
        }
    }

    /// A function-level reset: all that the driver made is gone. Memory stays mapped, because that is
    /// the machine's doing, and costs stay counted.
    pub fn reset(&mut self) {
        self.bar = BarState::default();
        self.firmware = FirmwareState::default();
        self.objects = Objects::default();
        self.engine = EngineState::default();
        self.interrupts.reset();
    }

    /// Resets all costs, and uses caches of these configurations from now on.
    pub fn begin_account(&mut self, translations: CacheConfig, contexts: CacheConfig) {
        self.cost = Cost::new(translations, contexts);
        self.dma.begin_account();
        self.interrupts.begin_account();
    }

    /// Writes the completion of a work request to a completion queue.
    pub fn complete(&mut self, cqn: u32, completion: Completion) {
        cq::complete(self, cqn, &completion);
    }

    /// Counts something: in the account, and in a set of Q counters.
    pub fn count(&mut self, set: u32, count: impl Fn(&mut DeviceCounters)) {
        count(&mut self.cost.count);
        if let Some(counters) = self.objects.plain.counters.get_mut(set) {
            count(counters);
        }
    }

    /// Raises an asynchronous event.
    pub fn event(&mut self, event: Event) {
        eq::event(self, event);
    }
}
