// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Guest memory that the virtual machine has mapped for DMA, by DMA address.
//!
//! Mappings may change while the device runs. Each access is looked up and counted. An access to memory that is not
//! wholly mapped faults and, as on PCIe, may be partially executed.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs::File;
use std::sync::atomic::{fence, Ordering};

use thiserror::Error;
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory};

/// Access to memory that is not mapped, or not mapped for writes.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("no memory is mapped at {0:#x}")]
pub struct DmaFault(
    /// DMA address.
    pub u64,
);

/// Number of DMA accesses of the device, and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Number of reads.
    pub reads: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Number of writes.
    pub writes: u64,
    /// Bytes written.
    pub written_bytes: u64,
}

#[derive(Debug)]
struct Map {
    region: MmapRegion,
    writable: bool,
}

/// Guest memory, by DMA address.
#[derive(Debug, Default)]
pub struct Dma {
    maps: BTreeMap<u64, Map>,
    traffic: Cell<Traffic>,
}

impl Dma {
    /// Maps `size` bytes of `file`, from `offset`, at `address`.
    pub fn map(
        &mut self,
        address: u64,
        size: u64,
        file: File,
        offset: u64,
        writable: bool,
    ) -> std::io::Result<()> {
        let invalid = || std::io::Error::from(std::io::ErrorKind::InvalidInput);
        let end = address.checked_add(size).ok_or_else(invalid)?;
        let below = self.maps.range(..end).next_back();
        if size == 0 || below.is_some_and(|(start, map)| start + map.region.size() as u64 > address)
        {
            return Err(invalid());
        }
        let length = usize::try_from(size).map_err(|_| invalid())?;
        let region = MmapRegion::from_file(FileOffset::new(file, offset), length)
            .map_err(std::io::Error::other)?;
        self.maps.insert(address, Map { region, writable });
        Ok(())
    }

    /// Removes all mappings within `size` bytes from `address`.
    pub fn unmap(&mut self, address: u64, size: u64) {
        let end = address.saturating_add(size);
        self.maps
            .retain(|start, map| *start < address || start + map.region.size() as u64 > end);
    }

    /// Removes all mappings.
    pub fn unmap_all(&mut self) {
        self.maps.clear();
    }

    /// Resets the numbers of accesses.
    pub fn begin_account(&mut self) {
        self.traffic.take();
    }

    /// Returns the accesses so far.
    pub fn traffic(&self) -> Traffic {
        self.traffic.get()
    }

    /// Reads memory at `address` into all of `bytes`.
    pub fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), DmaFault> {
        let mut traffic = self.traffic.get();
        traffic.reads += 1;
        traffic.read_bytes += bytes.len() as u64;
        self.traffic.set(traffic);
        self.peek(address, bytes)
    }

    /// Reads as [`Dma::read`] does, without counting: real hardware would need no bus access.
    pub fn peek(&self, address: u64, bytes: &mut [u8]) -> Result<(), DmaFault> {
        let mut done = 0;
        while done < bytes.len() {
            let at = address.checked_add(done as u64).ok_or(DmaFault(address))?;
            let (map, offset) = self.find(at).ok_or(DmaFault(at))?;
            let length = (bytes.len() - done).min(map.region.size() - offset);
            let part = &mut bytes[done..done + length];
            let slice = map.region.as_volatile_slice();
            slice.read_slice(part, offset).map_err(|_| DmaFault(at))?;
            done += length;
        }
        Ok(())
    }

    /// Writes all of `bytes` to memory at `address`. Writes reach memory in program order.
    pub fn write(&self, address: u64, bytes: &[u8]) -> Result<(), DmaFault> {
        let mut traffic = self.traffic.get();
        traffic.writes += 1;
        traffic.written_bytes += bytes.len() as u64;
        self.traffic.set(traffic);
        fence(Ordering::Release);
        let mut done = 0;
        while done < bytes.len() {
            let at = address.checked_add(done as u64).ok_or(DmaFault(address))?;
            let (map, offset) = self
                .find(at)
                .filter(|(map, _)| map.writable)
                .ok_or(DmaFault(at))?;
            let length = (bytes.len() - done).min(map.region.size() - offset);
            let slice = map.region.as_volatile_slice();
            let part = &bytes[done..done + length];
            slice.write_slice(part, offset).map_err(|_| DmaFault(at))?;
            done += length;
        }
        Ok(())
    }

    /// Reads a big-endian 32-bit word without counting.
    pub fn peek_be32(&self, address: u64) -> Result<u32, DmaFault> {
        let mut bytes = [0; 4];
        self.peek(address, &mut bytes)?;
        Ok(u32::from_be_bytes(bytes))
    }

    /// Reads a big-endian 32-bit word.
    pub fn read_be32(&self, address: u64) -> Result<u32, DmaFault> {
        let mut bytes = [0; 4];
        self.read(address, &mut bytes)?;
        Ok(u32::from_be_bytes(bytes))
    }

    /// Reads a big-endian 64-bit word.
    pub fn read_be64(&self, address: u64) -> Result<u64, DmaFault> {
        let mut bytes = [0; 8];
        self.read(address, &mut bytes)?;
        Ok(u64::from_be_bytes(bytes))
    }

    /// Writes a big-endian 32-bit word.
    pub fn write_be32(&self, address: u64, value: u32) -> Result<(), DmaFault> {
        self.write(address, &value.to_be_bytes())
    }

    fn find(&self, address: u64) -> Option<(&Map, usize)> {
        let (start, map) = self.maps.range(..=address).next_back()?;
        let offset = (address - start) as usize;
        (offset < map.region.size()).then_some((map, offset))
    }
}
