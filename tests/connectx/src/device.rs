// SPDX-License-Identifier: GPL-2.0 OR MIT
//! RNIC with all its components. Functions that need few components borrow only these.

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

/// Index of a device in its fabric, from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceId(pub usize);

/// RNIC.
#[derive(Debug)]
pub struct Device {
    /// Index in the fabric.
    pub id: DeviceId,
    /// PCI configuration space.
    pub pci: PciConfig,
    /// State of BAR 0.
    pub bar: BarState,
    /// File that the virtual machine maps in place of UAR pages; `None` if writes to UAR pages trap.
    pub doorbells: Option<File>,
    /// `true` if the device has no dynamically connected transport.
    pub without_dc: bool,
    /// Number of further creations of DC targets to reject.
    pub refused_targets: u32,
    /// `true` if no DC target completes its drain.
    pub holds_targets: bool,
    /// Guest memory.
    pub dma: Dma,
    /// MSI-X vectors.
    pub interrupts: Interrupts,
    /// State of the firmware between commands.
    pub firmware: FirmwareState,
    /// Objects created by the driver.
    pub objects: Objects,
    /// Port in the network.
    pub port: Port,
    /// Pending work of the engines.
    pub engine: EngineState,
    /// Number of dynamic connections created so far. A reset does not clear it, because targets on other devices keep
    /// connection numbers.
    pub connections: u64,
    /// Time since the start of the fabric.
    pub now: Duration,
    /// `true` if the device has failed: registers read as ones, and doorbells have no effect.
    pub dead: bool,
    /// Cost of the device's work in hardware.
    pub cost: Cost,
}

impl Device {
    /// Returns a device in the state after power-on.
    pub fn new(id: DeviceId, port: Port) -> Self {
        Device {
            id,
            pci: PciConfig::default(),
            bar: BarState::default(),
            doorbells: None,
            without_dc: false,
            refused_targets: 0,
            holds_targets: false,
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

    /// Function-level reset: destroys all objects of the driver. DMA mappings, which belong to the virtual machine, and
    /// costs remain.
    pub fn reset(&mut self) {
        self.bar = BarState::default();
        self.firmware = FirmwareState::default();
        self.objects = Objects::default();
        self.engine = EngineState::default();
        self.interrupts.reset();
    }

    /// Resets all costs, and replaces the caches by empty caches of these configurations.
    pub fn begin_account(&mut self, translations: CacheConfig, contexts: CacheConfig) {
        self.cost = Cost::new(translations, contexts);
        self.dma.begin_account();
        self.interrupts.begin_account();
    }

    /// Writes the completion of a work request to a completion queue.
    pub fn complete(&mut self, cqn: u32, completion: Completion) {
        cq::complete(self, cqn, &completion);
    }

    /// Updates a counter of the device and of a set of Q counters.
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
