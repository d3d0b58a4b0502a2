// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Firmware: executes the commands of the driver. Unsupported commands fail with the status of real firmware.

pub mod boot;
pub mod capability;
pub mod cq;
pub mod dct;
pub mod eq;
pub mod general;
mod memory;
pub mod multicast;
pub mod plain;
pub mod port;
pub mod qp;
pub mod queue;
pub mod registers;
pub mod srq;

use crate::device::Device;
use crate::layout::ifc::*;

/// Status of a rejected command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// Internal error.
    Internal = 0x01,
    /// The command does not exist.
    BadOpcode = 0x02,
    /// A parameter is out of range or not supported.
    BadParameter = 0x03,
    /// The command is invalid in this state of the device.
    BadSystemState = 0x04,
    /// The object does not exist.
    BadResource = 0x05,
    /// The object is in use.
    ResourceBusy = 0x06,
    /// A limit is exceeded.
    LimitExceeded = 0x08,
    /// The command is invalid in this state of the object.
    BadResourceState = 0x09,
    /// An index is out of range.
    BadIndex = 0x0a,
    /// The maximum number of objects of the kind is reached.
    NoResources = 0x0f,
    /// The command is invalid in this state of the QP.
    BadQpState = 0x10,
    /// A packet is malformed.
    BadPacket = 0x30,
    /// The new size of a completion queue is less than its number of outstanding entries.
    BadSizeOutstanding = 0x40,
    /// The input is too short.
    BadInputLength = 0x50,
    /// The output is too short.
    BadOutputLength = 0x51,
}

/// Executes a command. Parameters: device, input, and zeroed output of the length that the driver requests.
pub type Handler = fn(&mut Device, &[u8], &mut [u8]) -> Result<(), Status>;

/// Initialisation phase of the driver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    /// The device is not enabled.
    #[default]
    Off,
    /// The driver may query and set capabilities.
    Enabled,
    /// Objects can be created.
    Initialised,
}

/// State of the firmware between commands.
#[derive(Debug, Default)]
pub struct FirmwareState {
    /// Initialisation phase of the driver.
    pub phase: Phase,
    /// Selected interface version.
    pub interface: u32,
    /// Pages that the driver has given.
    pub pages: Vec<u64>,
    /// Capabilities that the driver has changed.
    pub settings: capability::Settings,
    /// Abilities of the port, as set by the driver.
    pub abilities: port::Abilities,
    /// Node description, as set by the driver.
    pub description: registers::Description,
}

impl FirmwareState {
    /// Returns `true` if a command is valid in this phase: most commands require an initialised device.
    fn takes(&self, opcode: u16) -> bool {
        let opcode = u32::from(opcode);
        match self.phase {
            Phase::Off => opcode == MLX5_CMD_OP_ENABLE_HCA,
            Phase::Enabled => matches!(
                opcode,
                MLX5_CMD_OP_QUERY_HCA_CAP
                    ..=MLX5_CMD_OP_SET_ISSI | MLX5_CMD_OP_ACCESS_REG | MLX5_CMD_OP_NOP
            ),
            Phase::Initialised => true,
        }
    }
}

/// Returns the handler of commands with this opcode. Each module has the handlers of its own opcodes.
pub fn handler(opcode: u16) -> Option<Handler> {
    [
        boot::handler,
        capability::handler,
        registers::handler,
        port::handler,
        plain::handler,
        eq::handler,
        general::handler,
        cq::handler,
        qp::handler,
        srq::handler,
        dct::handler,
        memory::handler,
        multicast::handler,
    ]
    .iter()
    .find_map(|family| family(opcode))
}
