// SPDX-License-Identifier: GPL-2.0 OR MIT
//! What a device's work would cost in hardware: how often it uses the bus, the network and its caches.

use serde::{Deserialize, Serialize};

use crate::cache::{Cache, CacheConfig, Replacement, Report};
use crate::interrupts::Interrupts;
use crate::memory::Dma;

/// A translation cache that holds 64 MiB in pages of 4 KiB.
const TRANSLATIONS: CacheConfig = CacheConfig {
    entries: 16 << 10,
    replacement: Replacement::Lru,
};

/// A cache for the contexts of active queue pairs.
const CONTEXTS: CacheConfig = CacheConfig {
    entries: 1 << 10,
    replacement: Replacement::Lru,
};

/// The account of a device, from its start.
#[derive(Clone, Debug)]
pub struct Cost {
    /// Plain counters.
    pub count: DeviceCounters,
    translations: Cache,
    contexts: Cache,
}

/// Plain counters of a device.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct DeviceCounters {
    /// Doorbells of send queues.
    pub doorbells: u64,
    /// Work requests taken from send queues.
    pub wqes: u64,
    /// Their bytes.
    pub wqe_bytes: u64,
    /// Packets sent.
    pub packets_sent: u64,
    /// Bytes of data in them.
    pub bytes_sent: u64,
    /// Packets of its own that the network lost by chance.
    pub packets_lost: u64,
    /// Packets received.
    pub packets_received: u64,
    /// Bytes of data in them.
    pub bytes_received: u64,
    /// Completions written.
    pub cqes: u64,
    /// Events written.
    pub eqes: u64,
    /// Dynamic connections made, as an initiator.
    pub connections: u64,
    /// Dynamic connections that came, as a target.
    pub connections_accepted: u64,
    /// Atomic operations done in the memory here.
    pub atomics: u64,
    /// Packets missing at the responder, as it noticed.
    pub out_of_sequence: u64,
    /// Requests that came again.
    pub duplicates: u64,
    /// Times that a requester received no response within its timeout.
    pub timeouts: u64,
    /// Times that a responder had no buffer for a message.
    pub receiver_not_ready: u64,
}

/// The account, to be shown.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct Statement {
    /// Plain counters.
    #[serde(flatten)]
    pub count: DeviceCounters,
    /// Reads of the machine's memory.
    pub dma_reads: u64,
    /// Bytes read.
    pub dma_read_bytes: u64,
    /// Writes of the machine's memory.
    pub dma_writes: u64,
    /// Bytes written.
    pub dma_write_bytes: u64,
    /// Interrupts raised.
    pub interrupts: u64,
    /// Look-ups of page translations.
    pub translations: Report,
    /// Look-ups of the contexts of queue pairs.
    pub contexts: Report,
}

impl Default for Cost {
    fn default() -> Self {
        Cost::new(TRANSLATIONS, CONTEXTS)
    }
}

impl Cost {
    /// An account of a device with such caches.
    pub fn new(translations: CacheConfig, contexts: CacheConfig) -> Self {
        Cost {
            count: DeviceCounters::default(),
            translations: Cache::new(translations),
            contexts: Cache::new(contexts),
        }
    }

    /// An entry of the translation table of a memory key was looked up.
    pub fn looked_up(&mut self, key: u32, entry: u64) {
        self.translations.look_up((u64::from(key) << 40) ^ entry);
    }

    /// The context of a queue pair (or DCT) was needed.
    pub fn context(&mut self, number: u32) {
        self.contexts.look_up(u64::from(number));
    }

    /// The account with what others have counted.
    pub fn statement(&self, dma: &Dma, interrupts: &Interrupts) -> Statement {
        let traffic = dma.traffic();
        Statement {
            count: self.count,
            dma_reads: traffic.reads,
            dma_read_bytes: traffic.read_bytes,
            dma_writes: traffic.writes,
            dma_write_bytes: traffic.written_bytes,
            interrupts: interrupts.raised(),
            translations: self.translations.report(),
            contexts: self.contexts.report(),
        }
    }
}
