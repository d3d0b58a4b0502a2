// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Test driver in this process. A machine is memory only. The driver sends commands by the command queue, writes rings
//! and doorbells. Time advances only by calls of a test.
//!
//! Keys translate each address to the same bus address, so tests use one kind of address only.

// The fuzzer uses only a part of the rig.
#![cfg_attr(fuzzing, allow(dead_code, unused_imports))]

pub mod fuzz;
mod objects;
#[cfg(test)]
mod tests;
mod work;

use std::collections::BTreeMap;
use std::time::Duration;

use rustix::fs::{ftruncate, memfd_create, MemfdFlags};

use crate::bar;
use crate::device::{Device, DeviceId};
use crate::fabric::Fabric;
use crate::layout::ifc::*;
use crate::layout::{be32, be64, put_be, set, size};
use crate::network::plan::{Plan, Rule};

pub(crate) use objects::{Mr, Options, RigCq, RigDct, RigQp, RigSrq, Spec};
pub(crate) use work::{Cqe, WorkRequest};

/// Size of the memory of each machine in bytes.
const MEMORY: u64 = 64 << 20;
/// First address of the memory. The first page is not mapped, so that 0 is no valid address.
const START: u64 = 4096;
const PAGE: u64 = 4096;
/// Byte of a slot of the command queue with the owner and the delivery status.
const STATUS: usize = 63;
/// Addresses of the mailboxes for input and output of a command.
const MAILBOXES: [u64; 2] = [MEMORY - (2 << 20), MEMORY - (1 << 20)];

/// Machines on a fabric.
pub(crate) struct Rig {
    pub(crate) fabric: Fabric,
    pub(crate) now: Duration,
    nodes: Vec<Node>,
    /// Inputs of all commands so far.
    history: Vec<Vec<u8>>,
}

/// Driver state of a machine.
struct Node {
    /// First unused address.
    free: u64,
    queue: u64,
    uar: u32,
    pd: u32,
    eqn: u32,
    eq: u64,
    events: u32,
    /// Number of consumed events of each completion queue, for its arm words.
    consumed_events: BTreeMap<u32, u32>,
}

/// Status of a rejected command.
pub(crate) type StatusCode = u8;

impl Rig {
    /// Returns a rig of `count` machines with initialised devices.
    pub(crate) fn new(count: usize) -> Self {
        Rig::on(Fabric::new(count))
    }

    /// Returns a rig of `count` machines with mapped doorbells, which do not trap.
    pub(crate) fn mapped(count: usize) -> Self {
        let mut fabric = Fabric::new(count);
        fabric.map_doorbells().unwrap();
        Rig::on(fabric)
    }

    fn on(fabric: Fabric) -> Self {
        let count = fabric.devices().len();
        let mut rig = Rig {
            fabric,
            now: Duration::ZERO,
            nodes: Vec::new(),
            history: Vec::new(),
        };
        for node in 0..count {
            let file = memfd_create("machine", MemfdFlags::CLOEXEC).unwrap();
            ftruncate(&file, MEMORY).unwrap();
            let device = rig.fabric.device(DeviceId(node));
            let size = MEMORY - START;
            device.dma.map(START, size, file.into(), 0, true).unwrap();
            rig.nodes.push(Node {
                free: START,
                queue: 0,
                uar: 0,
                pd: 0,
                eqn: 0,
                eq: 0,
                events: 0,
                consumed_events: BTreeMap::new(),
            });
            rig.boot(node);
        }
        rig
    }

    fn boot(&mut self, node: usize) {
        let queue = self.allocate(node, PAGE);
        self.nodes[node].queue = queue;
        self.write_bar(node, 0x10, &((queue >> 32) as u32).to_be_bytes());
        self.write_bar(node, 0x14, &(queue as u32).to_be_bytes());
        self.simple(node, MLX5_CMD_OP_ENABLE_HCA, 0);
        self.simple(node, MLX5_CMD_OP_INIT_HCA, 0);
        self.nodes[node].uar = self.simple(node, MLX5_CMD_OP_ALLOC_UAR, 0);
        self.nodes[node].pd = self.simple(node, MLX5_CMD_OP_ALLOC_PD, 0);
        self.create_eq(node);
    }

    pub(crate) fn device(&mut self, node: usize) -> &mut Device {
        self.fabric.device(DeviceId(node))
    }

    /// Allocates a protection domain.
    pub(crate) fn pd(&mut self, node: usize) -> u32 {
        self.simple(node, MLX5_CMD_OP_ALLOC_PD, 0)
    }

    /// Returns the LID of the port of a machine.
    pub(crate) fn lid(&mut self, node: usize) -> u16 {
        self.device(node).port.lid
    }

    /// Returns pages that are not in use.
    pub(crate) fn allocate(&mut self, node: usize, bytes: u64) -> u64 {
        let address = self.nodes[node].free;
        self.nodes[node].free += bytes.next_multiple_of(PAGE);
        assert!(
            self.nodes[node].free <= MAILBOXES[0],
            "a machine's memory is used up"
        );
        address
    }

    /// Returns the start of the memory that is not in use.
    fn allocated(&self, node: usize) -> u64 {
        self.nodes[node].free
    }

    pub(crate) fn write(&mut self, node: usize, address: u64, bytes: &[u8]) {
        self.device(node).dma.write(address, bytes).unwrap();
    }

    pub(crate) fn read(&mut self, node: usize, address: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.device(node).dma.peek(address, &mut bytes).unwrap();
        bytes
    }

    /// Writes to a register of the driver's UAR page.
    fn write_uar(&mut self, node: usize, register: u64, bytes: &[u8]) {
        let uar = u64::from(self.nodes[node].uar) * PAGE;
        self.write_bar(node, uar + register, bytes);
    }

    fn write_bar(&mut self, node: usize, offset: u64, bytes: &[u8]) {
        let (device, outbox) = self.fabric.parts(DeviceId(node));
        outbox.now = self.now;
        device.now = self.now;
        bar::write(device, offset, bytes, outbox);
    }

    /// Runs the fabric without advancing the time.
    pub(crate) fn run(&mut self) {
        loop {
            self.fabric.run(self.now);
            if self.fabric.deadline().is_none_or(|time| time > self.now) {
                return;
            }
        }
    }

    /// Drops all later packets from the port with this LID.
    pub(crate) fn drop_packets_from(&mut self, lid: u16) {
        let rule = Rule {
            from: Some(lid),
            drop: 1.0,
            ..Rule::default()
        };
        let plan = Plan {
            rules: vec![rule],
            ..Plan::default()
        };
        self.fabric.network.set_plan(plan).unwrap();
    }

    /// Advances the time by `time`.
    pub(crate) fn advance_time(&mut self, time: Duration) {
        let end = self.now + time;
        self.run();
        while let Some(next) = self.fabric.deadline().filter(|next| *next <= end) {
            self.now = next;
            self.run();
        }
        self.now = end;
    }

    /// Executes a command by slot 0 of the command queue. Returns its output.
    pub(crate) fn command(
        &mut self,
        node: usize,
        input: &[u8],
        output: usize,
    ) -> Result<Vec<u8>, StatusCode> {
        self.submit(node, input, output);
        self.history.push(input.to_vec());
        let slot = self.read(node, self.nodes[node].queue, 64);
        assert_eq!(slot[STATUS], 0, "the command was not delivered");
        let mut bytes = slot[32..48].to_vec();
        let mut next = MAILBOXES[1];
        while bytes.len() < output {
            let block = self.read(node, next, 576);
            bytes.extend(&block[..512]);
            next = be64(&block, 560);
        }
        match bytes[0] {
            0 => Ok(bytes),
            status => Err(status),
        }
    }

    /// Writes a command to slot 0, and rings the doorbell.
    fn submit(&mut self, node: usize, input: &[u8], output: usize) {
        let mut slot = [0; 64];
        slot[0] = 7;
        put_be(&mut slot, 4, 4, input.len() as u64);
        let inline = input.len().min(16);
        slot[16..16 + inline].copy_from_slice(&input[..inline]);
        self.write_mailboxes(node, MAILBOXES[0], input.len(), &input[inline..]);
        put_be(&mut slot, 8, 8, MAILBOXES[0]);
        self.write_mailboxes(node, MAILBOXES[1], output, &[]);
        put_be(&mut slot, 48, 8, MAILBOXES[1]);
        put_be(&mut slot, 56, 4, output as u64);
        slot[STATUS] = 1;
        slot[61] = !slot.iter().fold(0, |sum, byte| sum ^ byte);
        let queue = self.nodes[node].queue;
        self.write(node, queue, &slot);
        self.write_bar(node, 0x18, &1u32.to_be_bytes());
    }

    /// Writes the mailboxes for a message of `length` bytes. `data` is the message without its first 16 bytes.
    fn write_mailboxes(&mut self, node: usize, first: u64, length: usize, data: &[u8]) {
        let count = length.saturating_sub(16).div_ceil(512);
        for number in 0..count {
            let mut block = [0; 576];
            let part = data.chunks(512).nth(number).unwrap_or_default();
            block[..part.len()].copy_from_slice(part);
            let next = first + (number as u64 + 1) * 1024;
            put_be(
                &mut block,
                560,
                8,
                if number + 1 < count { next } else { 0 },
            );
            put_be(&mut block, 568, 4, number as u64);
            self.write(node, first + number as u64 * 1024, &block);
        }
    }

    /// Executes a command with one parameter. Returns the number in its output.
    pub(crate) fn simple(&mut self, node: usize, opcode: u32, number: u32) -> u32 {
        let output = self.try_simple(node, opcode, number);
        output.unwrap_or_else(|status| panic!("command {opcode:#x} was refused: {status:#x}"))
    }

    /// Executes a command as [`Rig::simple`] does. Returns the status of a rejected command.
    pub(crate) fn try_simple(
        &mut self,
        node: usize,
        opcode: u32,
        number: u32,
    ) -> Result<u32, StatusCode> {
        let mut input = [0; 16];
        put_be(&mut input, 0, 2, u64::from(opcode));
        put_be(&mut input, 8, 4, u64::from(number));
        let output = self.command(node, &input, 16)?;
        Ok(be32(&output, 8) & 0xff_ffff)
    }

    fn create_eq(&mut self, node: usize) {
        const LOG_SIZE: u32 = 8;
        let bytes = 64 << LOG_SIZE;
        let buffer = self.allocate(node, bytes);
        let mut input = vec![0; size!(create_eq_in)];
        set!(input, create_eq_in, opcode, MLX5_CMD_OP_CREATE_EQ);
        set!(input, create_eq_in, eq_context_entry.log_eq_size, LOG_SIZE);
        let uar = self.nodes[node].uar;
        set!(input, create_eq_in, eq_context_entry.uar_page, uar);
        // All event types without that of commands.
        let mask: u64 = !(1 << 0x0a);
        put_be(
            &mut input,
            crate::layout::at!(create_eq_in, event_bitmask),
            8,
            mask,
        );
        input.extend(pages(buffer, bytes));
        // The device owns an entry while its owner bit has the value of the previous pass.
        self.write(node, buffer, &[1; 64 << LOG_SIZE]);
        let output = self.command(node, &input, size!(create_eq_out)).unwrap();
        let eqn = crate::layout::get!(output, create_eq_out, eq_number);
        (self.nodes[node].eqn, self.nodes[node].eq) = (eqn, buffer);
    }

    /// Takes the next event: its type, and the number of its object.
    pub(crate) fn event(&mut self, node: usize) -> Option<(u8, u32)> {
        let Node {
            eq, events, eqn, ..
        } = self.nodes[node];
        let entry = self.read(node, eq + u64::from(events & 255) * 64, 64);
        if u32::from(entry[63] & 1) != (events >> 8) & 1 {
            return None;
        }
        self.nodes[node].events += 1;
        let consumed = (eqn << 24) | (events + 1) & 0xff_ffff;
        self.write_uar(node, 0x48, &consumed.to_be_bytes());
        let number = match entry[1] {
            0x04 => be32(&entry, 32),
            0x0c => be32(&entry, 40),
            _ => be32(&entry, 56),
        };
        if entry[1] == 0 {
            *self.nodes[node].consumed_events.entry(number).or_default() += 1;
        }
        Some((entry[1], number & 0xff_ffff))
    }

    /// Takes all events without completion events.
    pub(crate) fn events(&mut self, node: usize) -> Vec<(u8, u32)> {
        let all = std::iter::from_fn(|| self.event(node));
        all.filter(|(kind, _)| *kind != 0).collect()
    }
}

/// Returns the list of pages of a buffer in the format of commands.
fn pages(address: u64, bytes: u64) -> Vec<u8> {
    let pages = (0..bytes.div_ceil(PAGE)).map(|page| address + page * PAGE);
    pages.flat_map(u64::to_be_bytes).collect()
}
