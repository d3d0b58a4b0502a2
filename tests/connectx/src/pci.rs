// SPDX-License-Identifier: GPL-2.0 OR MIT
//! PCI configuration space of a ConnectX-5 Ex with an InfiniBand port.

/// Size of the configuration space in bytes.
pub const SIZE: usize = 4096;

const COMMAND: usize = 0x04;
const BAR0: usize = 0x10;
const INTERRUPT_LINE: usize = 0x3c;

const PM: usize = 0x40;
const PCIE: usize = 0x60;
const MSIX: usize = 0x9c;
const VENDOR: usize = 0xb0;

const DEVICE_CONTROL: usize = PCIE + 0x08;
const LINK_CONTROL: usize = PCIE + 0x10;
const DEVICE_CONTROL_2: usize = PCIE + 0x28;

/// Registers of the vendor-specific capability: a window to diagnostic registers, guarded by a semaphore. The window
/// has no registers here: the space register reports that the selected space is unsupported, which drivers accept.
const TURN: usize = VENDOR + 0x08;
const SEMAPHORE: usize = VENDOR + 0x0c;

/// Offsets of the MSI-X table and of its pending bits in BAR 0.
const MSIX_TABLE: u32 = 0x2000;
const MSIX_PENDING: u32 = 0x3000;

/// Function-level reset, in the high byte of device control.
const FUNCTION_RESET: u8 = 0x80;

/// Fixed contents of the configuration space: offset and bytes.
const FIXED: &[(usize, &[u8])] = &[
    (0x00, &[0xb3, 0x15, 0x19, 0x10]), // Mellanox, ConnectX-5 Ex
    (0x06, &[0x10, 0x00]),             // has capabilities
    (0x09, &[0x00, 0x07, 0x02]),       // InfiniBand controller
    (BAR0, &[0x0c]),                   // memory, 64 bits, prefetchable
    (0x2c, &[0xb3, 0x15, 0x08, 0x00]), // the card
    (0x34, &[PM as u8]),
    (0x3d, &[0x00]), // no INTx
    (PM, &[0x01, PCIE as u8, 0x03, 0x00]),
    (PM + 4, &[0x08, 0x00]), // keeps its state in D3
    (PCIE, &[0x10, MSIX as u8, 0x02, 0x00]),
    (PCIE + 0x04, &[0xe2, 0x8f, 0x00, 0x10]), // 512 bytes a packet, function-level reset
    (PCIE + 0x0c, &[0x03, 0xf1, 0x43, 0x00]), // 8 GT/s, 16 lanes
    (PCIE + 0x12, &[0x03, 0x11]),             // and that is what it has
    (MSIX, &[0x11, VENDOR as u8]),
    (VENDOR, &[0x09, 0x00, 0x18]),
];

/// Writable bits: offset and mask of bytes.
const WRITABLE: &[(usize, &[u8])] = &[
    (COMMAND, &[0x47, 0x05]),
    (BAR0, &[0x00, 0x00, 0x00, 0xfe, 0xff, 0xff, 0xff, 0xff]),
    (INTERRUPT_LINE, &[0xff]),
    (PM + 4, &[0x03]),
    (DEVICE_CONTROL, &[0xff, 0x7f]),
    (LINK_CONTROL, &[0xff, 0x0f]),
    (DEVICE_CONTROL_2, &[0xff, 0xff]),
    (MSIX + 3, &[0xc0]),
];

/// Configuration space of a function.
#[derive(Debug)]
pub struct PciConfig {
    bytes: Box<[u8; SIZE]>,
    writable: Box<[u8; SIZE]>,
}

impl Default for PciConfig {
    /// Returns the contents after a reset.
    fn default() -> Self {
        let mut bytes = Box::new([0; SIZE]);
        let mut writable = Box::new([0; SIZE]);
        for (space, parts) in [(&mut bytes, FIXED), (&mut writable, WRITABLE)] {
            for (at, part) in parts {
                space[*at..at + part.len()].copy_from_slice(part);
            }
        }
        let vectors = crate::interrupts::VECTORS as u16 - 1;
        bytes[MSIX + 2..MSIX + 4].copy_from_slice(&vectors.to_le_bytes());
        bytes[MSIX + 4..MSIX + 8].copy_from_slice(&MSIX_TABLE.to_le_bytes());
        bytes[MSIX + 8..MSIX + 12].copy_from_slice(&MSIX_PENDING.to_le_bytes());
        bytes[TURN] = 1;
        PciConfig { bytes, writable }
    }
}

impl PciConfig {
    /// Reads `data.len()` bytes. Bytes beyond the space read as 0.
    pub fn read(&self, offset: usize, data: &mut [u8]) {
        for (at, byte) in data.iter_mut().enumerate() {
            *byte = self.bytes.get(offset + at).copied().unwrap_or(0);
        }
    }

    /// Writes the writable bits. Returns `true` if the write requests a function-level reset.
    #[must_use]
    pub fn write(&mut self, offset: usize, data: &[u8]) -> bool {
        if offset == SEMAPHORE {
            self.take_turn(data);
        }
        let mut reset = false;
        for (at, value) in (offset..SIZE).zip(data) {
            let mask = self.writable[at];
            self.bytes[at] = self.bytes[at] & !mask | value & mask;
            reset |= at == DEVICE_CONTROL + 1 && value & FUNCTION_RESET != 0;
        }
        if reset {
            *self = PciConfig::default();
        }
        reset
    }

    /// Handles a write to the semaphore: the value of the ticket counter acquires it, and 0 releases it.
    fn take_turn(&mut self, data: &[u8]) {
        let Ok(value) = data.try_into().map(u32::from_le_bytes) else {
            return;
        };
        let turn = self.word(TURN);
        if value == 0 {
            self.set_word(SEMAPHORE, 0);
        } else if self.word(SEMAPHORE) == 0 && value == turn {
            self.set_word(SEMAPHORE, value);
            self.set_word(TURN, turn.wrapping_add(1).max(1));
        }
    }

    fn word(&self, at: usize) -> u32 {
        let mut bytes = [0; 4];
        self.read(at, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    fn set_word(&mut self, at: usize, value: u32) {
        self.bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bar_written_with_all_ones_returns_size() {
        let mut config = PciConfig::default();
        assert!(!config.write(BAR0, &[0xff; 8]));
        let low = config.word(BAR0);
        assert_eq!(low & 0xf, 0x0c);
        assert_eq!(u64::from(!(low & !0xf)) + 1, crate::bar::SIZE);
        assert_eq!(config.word(BAR0 + 4), u32::MAX);
    }

    #[test]
    fn capability_list_is_terminated() {
        let config = PciConfig::default();
        let mut found = Vec::new();
        let mut at = config.word(0x34) as usize & 0xff;
        while at != 0 {
            let header = config.word(at);
            found.push(header as u8);
            at = (header >> 8) as usize & 0xff;
        }
        assert_eq!(found, [0x01, 0x10, 0x11, 0x09]);
    }

    #[test]
    fn reset_discards_written_config() {
        let mut config = PciConfig::default();
        assert!(!config.write(COMMAND, &[0x06]));
        assert_eq!(config.word(COMMAND) & 0xff, 0x06);
        assert!(config.write(DEVICE_CONTROL + 1, &[FUNCTION_RESET]));
        assert_eq!(config.word(COMMAND) & 0xff, 0);
    }

    #[test]
    fn held_semaphore_rejects_other_owner() {
        let mut config = PciConfig::default();
        let turn = config.word(TURN);
        let mut write = |value: u32| {
            assert!(!config.write(SEMAPHORE, &value.to_le_bytes()));
            config.word(SEMAPHORE)
        };
        assert_eq!(write(turn), turn);
        assert_eq!(write(turn + 1), turn);
        assert_eq!(write(0), 0);
        assert_eq!(write(turn), 0);
        assert_eq!(write(turn + 1), turn + 1);
    }

    #[test]
    fn identification_registers_are_read_only() {
        let mut config = PciConfig::default();
        let before = config.word(0);
        assert!(!config.write(0, &[0; 4]));
        assert!(!config.write(SIZE - 2, &[1; 8]));
        assert_eq!(config.word(0), before);
    }
}
