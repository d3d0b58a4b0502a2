// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Cost of the work of a device in hardware: its use of bus, network and caches.

use serde::{Deserialize, Serialize};

use crate::cache::{Cache, CacheConfig, Replacement, Report};
use crate::interrupts::Interrupts;
use crate::memory::Dma;

/// Translation cache for 64 MiB in pages of 4 KiB.
const TRANSLATIONS: CacheConfig = CacheConfig {
    entries: 16 << 10,
    replacement: Replacement::Lru,
};

/// Cache of the contexts of active queue pairs.
const CONTEXTS: CacheConfig = CacheConfig {
    entries: 1 << 10,
    replacement: Replacement::Lru,
};

/// Cost counters of a device since the last reset of the account.
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
    /// Bytes of these work requests.
    pub wqe_bytes: u64,
    /// Packets sent.
    pub packets_sent: u64,
    /// Bytes of data in them.
    pub bytes_sent: u64,
    /// Packets sent by the device that the network dropped by its fault plan.
    pub packets_lost: u64,
    /// Packets received.
    pub packets_received: u64,
    /// Bytes of data in them.
    pub bytes_received: u64,
    /// Completions written.
    pub cqes: u64,
    /// Events written.
    pub eqes: u64,
    /// Dynamic connections created as an initiator.
    pub connections: u64,
    /// Dynamic connections accepted as a target.
    pub connections_accepted: u64,
    /// Atomic operations executed as a responder.
    pub atomics: u64,
    /// Gaps in the PSNs detected by the responder.
    pub out_of_sequence: u64,
    /// Duplicate requests received.
    pub duplicates: u64,
    /// Timeouts of the requester without a response.
    pub timeouts: u64,
    /// Requests for which the responder had no receive, or an absent page.
    pub receiver_not_ready: u64,
}

/// Snapshot of the costs of a device.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct Statement {
    /// Plain counters.
    #[serde(flatten)]
    pub count: DeviceCounters,
    /// DMA reads.
    pub dma_reads: u64,
    /// Bytes read.
    pub dma_read_bytes: u64,
    /// DMA writes.
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
    /// Returns zeroed counters and empty caches.
    pub fn new(translations: CacheConfig, contexts: CacheConfig) -> Self {
        Cost {
            count: DeviceCounters::default(),
            translations: Cache::new(translations),
            contexts: Cache::new(contexts),
        }
    }

    /// Records a look-up of an entry of the translation table of a memory key.
    pub fn record_translation(&mut self, key: u32, entry: u64) {
        self.translations.look_up((u64::from(key) << 40) ^ entry);
    }

    /// Records a look-up of the context of a queue pair or DC target.
    pub fn record_context(&mut self, number: u32) {
        self.contexts.look_up(u64::from(number));
    }

    /// Returns a snapshot with the counters of DMA and interrupts.
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
