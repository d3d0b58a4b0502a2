// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Commands that firmware rejects: limits, unsupported values, and destruction of objects in use.

use super::*;
use crate::firmware::Status;
use crate::layout::ifc::*;
use crate::layout::{at, get, put_be, set, size};

const MIGRATED: u32 = 3;
const ADDRESS_TO_QP: u32 = 0x3a;

impl Rig {
    /// Checks that a completion queue cannot be destroyed before the object that uses it.
    #[track_caller]
    fn assert_busy_until(&mut self, cq: &RigCq, destroy: u32, number: u32) {
        let destroyed = self.try_simple(0, MLX5_CMD_OP_DESTROY_CQ, cq.number);
        assert_eq!(destroyed, Err(Status::ResourceBusy as u8));
        self.simple(0, destroy, number);
        self.simple(0, MLX5_CMD_OP_DESTROY_CQ, cq.number);
    }

    /// Creates a general object of this type for a queue pair.
    fn map_address(&mut self, kind: u32, qp: u32) -> Result<u32, u8> {
        let mut input = vec![0; size!(general_obj_in_cmd_hdr) + 64];
        let opcode = MLX5_CMD_OP_CREATE_GENERAL_OBJECT;
        set!(input, general_obj_in_cmd_hdr, opcode, opcode);
        set!(input, general_obj_in_cmd_hdr, obj_type, kind);
        put_be(&mut input, size!(general_obj_in_cmd_hdr) + 12, 4, qp.into());
        let output = self.command(0, &input, size!(general_obj_out_cmd_hdr))?;
        Ok(get!(output, general_obj_out_cmd_hdr, obj_id))
    }

    /// Destroys a general object of this type.
    fn unmap_address(&mut self, kind: u32, number: u32) -> Result<(), u8> {
        let mut input = [0; size!(general_obj_in_cmd_hdr)];
        let opcode = MLX5_CMD_OP_DESTROY_GENERAL_OBJECT;
        set!(input, general_obj_in_cmd_hdr, opcode, opcode);
        set!(input, general_obj_in_cmd_hdr, obj_type, kind);
        set!(input, general_obj_in_cmd_hdr, obj_id, number);
        let output = self.command(0, &input, size!(general_obj_out_cmd_hdr));
        output.map(drop)
    }

    /// Gives or reclaims pages. Returns the number of pages in the output.
    fn manage_pages(&mut self, gives: bool, count: usize) -> Result<u32, u8> {
        let mut input = vec![0; size!(manage_pages_in) + if gives { 8 * count } else { 0 }];
        set!(input, manage_pages_in, opcode, MLX5_CMD_OP_MANAGE_PAGES);
        set!(input, manage_pages_in, op_mod, if gives { 1u32 } else { 2 });
        set!(input, manage_pages_in, input_num_entries, count as u32);
        let output = self.command(0, &input, size!(manage_pages_out) + 8 * count)?;
        Ok(get!(output, manage_pages_out, output_num_entries))
    }

    /// Creates a key in the free state with a table of `bytes` bytes, in this access mode.
    fn free_key(&mut self, mode: u32, bytes: u32) -> Result<u32, u8> {
        let mut context = [0; size!(mkc)];
        set!(context, mkc, access_mode_1_0, mode);
        set!(context, mkc, free, 1u32);
        set!(context, mkc, umr_en, 1u32);
        set!(context, mkc, log_page_size, 12u32);
        set!(context, mkc, pd, self.nodes[0].pd);
        set!(context, mkc, translations_octword_size, bytes / 16);
        let mut input = vec![0; size!(create_mkey_in)];
        set!(input, create_mkey_in, opcode, MLX5_CMD_OP_CREATE_MKEY);
        let at = at!(create_mkey_in, memory_key_mkey_entry);
        input[at..at + context.len()].copy_from_slice(&context);
        let output = self.command(0, &input, size!(create_mkey_out))?;
        Ok(get!(output, create_mkey_out, mkey_index))
    }
}

#[test]
fn cq_of_qp_is_not_destroyed() {
    let mut pair = Pair::reliable();
    let (cq, qp) = (pair.cqs[0].number, pair.qps[0].number);
    let destroyed = pair.rig.try_simple(0, MLX5_CMD_OP_DESTROY_CQ, cq);
    assert_eq!(destroyed, Err(Status::ResourceBusy as u8));
    pair.rig.simple(0, MLX5_CMD_OP_DESTROY_QP, qp);
    pair.rig.simple(0, MLX5_CMD_OP_DESTROY_CQ, cq);
}

#[test]
fn receive_cq_is_not_destroyed_while_qp_has_receives() {
    let mut rig = Rig::new(1);
    let [send_cq, receive_cq, unused] = [0; 3].map(|_| rig.cq(0, 4));
    let spec = Spec {
        receive_cq,
        ..Spec::new(Transport::Rc, send_cq)
    };
    let qp = rig.qp(0, &spec);
    rig.assert_busy_until(&receive_cq, MLX5_CMD_OP_DESTROY_QP, qp.number);
    // An initiator has no receives.
    let spec = Spec {
        receive_cq: unused,
        ..Spec::new(Transport::Dci, send_cq)
    };
    let qp = rig.qp(0, &spec);
    rig.simple(0, MLX5_CMD_OP_DESTROY_CQ, unused.number);
    rig.assert_busy_until(&send_cq, MLX5_CMD_OP_DESTROY_QP, qp.number);
}

#[test]
fn cq_of_dct_or_srq_is_not_destroyed() {
    let mut rig = Rig::new(1);
    let cqs = [0; 2].map(|_| rig.cq(0, 4));
    let xrcd = rig.simple(0, MLX5_CMD_OP_ALLOC_XRCD, 0);
    let srq = rig.srq(0, 4, Some((xrcd, cqs[0])));
    rig.assert_busy_until(&cqs[0], MLX5_CMD_OP_DESTROY_XRC_SRQ, srq.number);
    let srq = rig.srq(0, 4, None);
    let dct = rig.dct(&srq, &cqs[1], 0, &Options::default());
    rig.simple(0, MLX5_CMD_OP_DRAIN_DCT, dct.number);
    rig.assert_busy_until(&cqs[1], MLX5_CMD_OP_DESTROY_DCT, dct.number);
}

#[test]
fn address_mapping_requires_existing_qp() {
    let mut pair = Pair::reliable();
    let qp = pair.qps[0].number;
    let mapping = pair.rig.map_address(ADDRESS_TO_QP, qp).unwrap();
    let not_found = Err(Status::BadResource as u8);
    assert_eq!(pair.rig.map_address(ADDRESS_TO_QP, qp + 100), not_found);
    let unknown = Err(Status::BadParameter as u8);
    assert_eq!(pair.rig.map_address(ADDRESS_TO_QP + 1, qp), unknown);
    let mut unmap = |kind| pair.rig.unmap_address(kind, mapping);
    assert_eq!(unmap(ADDRESS_TO_QP + 1), unknown.map(drop));
    assert_eq!(unmap(ADDRESS_TO_QP), Ok(()));
    assert_eq!(unmap(ADDRESS_TO_QP), not_found.map(drop));
}

#[test]
fn pages_beyond_requested_number_are_rejected() {
    let mut rig = Rig::new(1);
    assert!(rig.manage_pages(true, 16).is_ok());
    let rejected = rig.manage_pages(true, 1);
    assert_eq!(rejected, Err(Status::LimitExceeded as u8));
    assert_eq!(rig.manage_pages(false, 20), Ok(16));
    assert!(rig.manage_pages(true, 16).is_ok());
}

#[test]
fn total_size_of_key_tables_is_limited() {
    const LARGE: u32 = 64 << 20;
    // Page tables, and range tables, which need memory for cached range ends.
    for (mode, most) in [(1, 16), (2, 10)] {
        let mut rig = Rig::new(1);
        let keys: Vec<u32> = std::iter::from_fn(|| rig.free_key(mode, LARGE).ok())
            .take(100)
            .collect();
        assert_eq!(keys.len(), most);
        assert_eq!(rig.free_key(mode, LARGE), Err(Status::NoResources as u8));
        rig.simple(0, MLX5_CMD_OP_DESTROY_MKEY, keys[0]);
        assert!(rig.free_key(mode, LARGE).is_ok());
    }
}

#[test]
fn read_limit_above_capability_is_rejected() {
    let mut pair = Pair::reliable();
    let mut qp = pair.qps[0];
    let mut context = pair.rig.query(&qp);
    pair.rig.reset(&mut qp);
    let mut modify = |opcode, context: &[u8]| pair.rig.modify(&qp, opcode, context);
    let rejected = Err(Status::BadParameter as u8);
    assert_eq!(modify(MLX5_CMD_OP_RST2INIT_QP, &context), Ok(()));
    set!(context, qpc, log_rra_max, 7u32);
    assert_eq!(modify(MLX5_CMD_OP_INIT2RTR_QP, &context), rejected);
    set!(context, qpc, log_rra_max, 6u32);
    assert_eq!(modify(MLX5_CMD_OP_INIT2RTR_QP, &context), Ok(()));
    set!(context, qpc, log_sra_max, 7u32);
    assert_eq!(modify(MLX5_CMD_OP_RTR2RTS_QP, &context), rejected);
    set!(context, qpc, log_sra_max, 6u32);
    assert_eq!(modify(MLX5_CMD_OP_RTR2RTS_QP, &context), Ok(()));
}

#[test]
fn path_migration_is_rejected() {
    const ALTERNATE_PATH: u32 = 1 << 0;
    const MIGRATION: u32 = 1 << 10;
    let mut pair = Pair::reliable();
    let qp = pair.qps[0];
    let rejected = Err(Status::BadParameter as u8);
    let mut context = pair.rig.query(&qp);
    assert_eq!(pair.rig.change(&qp, ALTERNATE_PATH, &context), rejected);
    set!(context, qpc, pm_state, MIGRATED);
    assert_eq!(pair.rig.change(&qp, MIGRATION, &context), Ok(()));
    set!(context, qpc, pm_state, MIGRATED - 2);
    assert_eq!(pair.rig.change(&qp, MIGRATION, &context), rejected);
}

#[test]
fn truncated_command_is_rejected() {
    let mut pair = Pair::reliable();
    let rejected = Err(Status::BadInputLength as u8);
    let mut input = vec![0; at!(create_qp_in, qpc) + size!(qpc) - 1];
    set!(input, create_qp_in, opcode, MLX5_CMD_OP_CREATE_QP);
    assert_eq!(pair.rig.command(0, &input, 16), rejected);
    set!(input, create_qp_in, opcode, MLX5_CMD_OP_ALLOC_PD);
    assert_eq!(pair.rig.command(0, &input[..12], 16), rejected);
}
