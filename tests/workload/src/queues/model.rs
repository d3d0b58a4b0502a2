// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Requests of all kinds, many in flight, each in a range of a region that no other request uses. Their results and
//! effects must match a model.

use anyhow::{ensure, Context, Result};
use clap::Args;
use kite::{AllocOptions, Cluster, Completion, IoQueue, Region};

use super::TIMEOUT;
use crate::support::random::Random;

/// Bytes of a part: longer than a transfer that is posted at once.
const PART: usize = (64 << 10) + 4096 + 104;

/// Parts of each region.
const PARTS: usize = 16;

/// Operations, depth and seed.
#[derive(Args, Clone, Debug)]
pub(crate) struct QueueCheck {
    /// Operations
    #[arg(long, default_value_t = 2000)]
    operations: u64,
    /// Operations in flight
    #[arg(long, default_value_t = 32)]
    depth: u32,
    /// Seed of all random numbers
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Nodes with a region each; another region is striped over all of them. 0 is this node
    #[arg(long, value_delimiter = ',', default_value = "0,1,2,3")]
    nodes: Vec<u32>,
}

/// Part of a region with its model, and its part of the memory of the queue.
struct Slot {
    region: Region,
    offset: u64,
    at: usize,
    model: Vec<u8>,
    expected: Option<ExpectedResult>,
}

/// Expected result of a completion.
#[derive(Debug)]
enum ExpectedResult {
    Nothing,
    /// Offset and length of the bytes that were read.
    Bytes(usize, usize),
    /// Previous value of a word.
    Word(u64),
}

impl QueueCheck {
    /// Runs the operations, and compares the regions at the end.
    pub(crate) fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        let mut slots = self.alloc_slots(&cluster)?;
        let queue = cluster.create_queue(self.depth, slots.len() * PART);
        let mut queue = queue.context("cannot create the queue")?;
        let mut random = Random::new(self.seed, cluster.view()?.local_node.into());
        let mut begun = 0;
        while begun < self.operations || queue.in_flight() > 0 {
            let depth = queue.entries().min(slots.len());
            if begun < self.operations && queue.in_flight() < depth {
                let tag = random.below(slots.len() as u64);
                let slot = &mut slots[tag as usize];
                if slot.expected.is_none() {
                    slot.start(tag, &mut queue, &mut random)?;
                    begun += 1;
                }
                continue;
            }
            let completion = queue.wait()?;
            slots[completion.tag as usize].check_completion(&queue, completion)?;
        }
        for slot in &slots {
            let mut found = vec![0; PART];
            slot.region.read_at(&mut found, slot.offset)?;
            ensure!(
                found == slot.model,
                "CORRUPT: a part differs from the model"
            );
        }
        println!("{begun} operations, {} system calls", queue.system_calls());
        Ok(())
    }

    fn alloc_slots(&self, cluster: &Cluster) -> Result<Vec<Slot>> {
        let mut places: Vec<Vec<u32>> = self.nodes.iter().map(|&node| vec![node]).collect();
        places.push(self.nodes.clone());
        let mut slots = Vec::new();
        for nodes in places {
            let cause = format!("cannot allocate on the nodes {nodes:?}");
            let options = AllocOptions::new((PARTS * PART) as u64).nodes(nodes);
            let region = cluster.alloc(&options).context(cause)?;
            let region = region.with_timeout(TIMEOUT);
            for part in 0..PARTS {
                slots.push(Slot {
                    region: region.clone(),
                    offset: (part * PART) as u64,
                    at: slots.len() * PART,
                    model: vec![0; PART],
                    expected: None,
                });
            }
        }
        Ok(slots)
    }
}

impl Slot {
    fn start(&mut self, tag: u64, queue: &mut IoQueue, random: &mut Random) -> Result<()> {
        let len = random.size(PART as u64) as usize;
        let from = random.below((PART - len) as u64 + 1) as usize;
        let offset = self.offset + from as u64;
        let memory = self.at..self.at + len;
        self.expected = Some(match random.below(10) {
            0..4 => {
                random.fill(&mut self.model[from..from + len]);
                queue.store(self.at, &self.model[from..from + len])?;
                queue.write(tag, &self.region, offset, memory)?;
                ExpectedResult::Nothing
            }
            4..8 => {
                queue.read(tag, &self.region, offset, memory)?;
                ExpectedResult::Bytes(from, len)
            }
            8 => {
                let byte = random.next() as u8;
                self.model[from..from + len].fill(byte);
                queue.fill(tag, &self.region, byte, offset, len as u64)?;
                ExpectedResult::Nothing
            }
            _ => self.start_atomic(tag, queue, random)?,
        });
        Ok(())
    }

    /// Starts an atomic operation.
    fn start_atomic(
        &mut self,
        tag: u64,
        queue: &mut IoQueue,
        random: &mut Random,
    ) -> Result<ExpectedResult> {
        let from = 8 * random.below(PART as u64 / 8) as usize;
        let (offset, operand) = (self.offset + from as u64, random.next());
        let bytes = &mut self.model[from..from + 8];
        let before = u64::from_ne_bytes(bytes.try_into()?);
        let after = match random.below(4) {
            0 => {
                queue.fetch_add(tag, &self.region, offset, operand)?;
                before.wrapping_add(operand)
            }
            1 => {
                queue.swap(tag, &self.region, offset, operand)?;
                operand
            }
            2 => {
                queue.compare_swap(tag, &self.region, offset, before, operand)?;
                operand
            }
            _ => {
                queue.compare_swap(tag, &self.region, offset, before ^ 1, operand)?;
                before
            }
        };
        bytes.copy_from_slice(&after.to_ne_bytes());
        Ok(ExpectedResult::Word(before))
    }

    fn check_completion(&mut self, queue: &IoQueue, completion: Completion) -> Result<()> {
        let expected = self.expected.take();
        let value = completion
            .result
            .with_context(|| format!("request with the expected result {expected:?}"))?;
        match expected {
            Some(ExpectedResult::Nothing) => ensure!(value == 0, "value {value}, expected 0"),
            Some(ExpectedResult::Word(word)) => {
                ensure!(value == word, "value {value}, expected {word}")
            }
            Some(ExpectedResult::Bytes(from, len)) => {
                let mut found = vec![0; len];
                queue.load(self.at, &mut found)?;
                ensure!(
                    found == self.model[from..from + len],
                    "CORRUPT: a read differs from the model"
                );
            }
            None => anyhow::bail!("completion without a request"),
        }
        Ok(())
    }
}
