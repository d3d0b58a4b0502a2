// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Objects that the driver of a test creates, each with the commands for it.

mod cq;
mod memory;
mod qp;
mod receive;

use super::{pages, Rig};
use crate::layout::ifc::*;

pub(crate) use cq::RigCq;
pub(crate) use memory::{rights, Mr};
pub(crate) use qp::{encode_stream_reset, Options, RigQp, Spec};
pub(super) use receive::{Posting, STRIDE};
pub(crate) use receive::{RigDct, RigSrq};
