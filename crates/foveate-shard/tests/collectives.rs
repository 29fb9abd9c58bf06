//! Ranks that are threads and ranks over TCP: every collective against what it should give, and every
//! way to wait for ever. `tcp.rs` has what only processes can do to each other.

mod processes;

use std::time::{Duration, Instant};

use foveate_shard::collectives::{
    Collectives, Expected, Kind, Message, OneRank, Rank, agree, run_threads,
};
use foveate_shard::{Cut, ShardError};
use processes::run_tcp;

const SOON: Duration = Duration::from_secs(20);

/// Runs `body` on ranks of every kind.
fn on_all(ranks: usize, body: impl Fn(&Rank) -> Result<(), ShardError> + Sync) {
    run_threads(ranks, SOON, &body).unwrap();
    run_tcp(ranks, SOON, &body).unwrap();
}

fn values(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| ((rank * 31 + i * 7) as f32).sin() * 10f32.powi((rank % 5) as i32)).collect()
}

#[test]
fn collectives_of_uneven_parts_give_what_they_should_and_sum_in_order_of_rank() {
    for ranks in [1, 2, 3, 5, 16] {
        let len = 37;
        let mut sums = vec![0.0f32; len];
        for rank in 0..ranks {
            sums.iter_mut().zip(values(rank, len)).for_each(|(sum, v)| *sum += v);
        }
        let cut = Cut::of_lengths(
            &(0..ranks)
                .map(|i| if i + 1 == ranks { len - i * (len / ranks) } else { len / ranks })
                .collect::<Vec<_>>(),
        )
        .unwrap();
        on_all(ranks, |comm| {
            let own = comm.rank();
            assert_eq!(comm.ranks(), ranks);
            let parts = (0..ranks).map(|to| vec![(own * 16 + to) as u8; own + 2 * to]).collect();
            for (from, part) in comm.exchange(parts)?.into_iter().enumerate() {
                assert_eq!(part, vec![(from * 16 + own) as u8; from + 2 * own]);
            }
            for (from, part) in comm.all_gather(&vec![own as u8; own])?.into_iter().enumerate() {
                assert_eq!(part, vec![from as u8; from]);
            }
            for root in 0..ranks {
                assert_eq!(comm.broadcast(root, &[own as u8, 7])?, [root as u8, 7]);
            }
            let mut summed = values(own, len);
            comm.all_reduce(&mut summed)?;
            assert_eq!(summed, sums, "bits: in order of rank");
            assert_eq!(comm.reduce_scatter(&values(own, len), &cut)?, sums[cut.range(own)]);
            agree(comm, &[("mask", 3), ("seed", 4)])
        });
    }
}

#[test]
fn one_rank_is_a_group_too() {
    let comm = OneRank;
    assert_eq!(comm.all_gather(&[1, 2]).unwrap(), [[1, 2]]);
    let mut one = [1.5f32, -2.0];
    comm.all_reduce(&mut one).unwrap();
    assert_eq!(one, [1.5, -2.0]);
    assert_eq!(comm.reduce_scatter(&one, &Cut::even(2, 1)).unwrap(), one);
    assert!(comm.exchange(vec![]).is_err());
    assert!(comm.subgroup(&[0]).unwrap().subgroup(&[1]).is_err());
    let to_itself = vec![Message { peer: 0, bytes: vec![1] }];
    assert!(comm.send_receive(to_itself.clone(), &[Expected { peer: 0, bytes: 2 }]).is_err());
    assert_eq!(comm.send_receive(to_itself, &[Expected { peer: 0, bytes: 1 }]).unwrap(), [[1]]);
}

#[test]
fn subgroups_of_a_mesh_do_not_hear_each_other() {
    on_all(6, |world| {
        let rank = world.rank();
        let row = world.subgroup(&[rank / 3 * 3, rank / 3 * 3 + 1, rank / 3 * 3 + 2])?;
        let column = world.subgroup(&[rank % 3, rank % 3 + 3])?;
        let again = world.subgroup(&[rank % 3, rank % 3 + 3])?;
        for _ in 0..20 {
            let mut sum = [rank as f32];
            row.all_reduce(&mut sum)?;
            assert_eq!(sum, [[3.0, 12.0][rank / 3]]);
            let parts = column.all_gather(&[rank as u8])?;
            assert_eq!(parts, [[rank as u8 % 3], [rank as u8 % 3 + 3]]);
            assert_eq!(again.all_gather(&[9])?, [[9], [9]]);
        }
        Ok(())
    });
}

#[test]
fn a_ring_of_sends_does_not_wait_in_a_circle() {
    on_all(5, |comm| {
        let (rank, ranks) = (comm.rank(), comm.ranks());
        let (next, before) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
        for turn in 0..10 {
            let sends = vec![Message { peer: next, bytes: vec![turn; rank + 1] }];
            let got = comm.send_receive(sends, &[Expected { peer: before, bytes: before + 1 }])?;
            assert_eq!(got, [vec![turn; before + 1]]);
        }
        Ok(())
    });
}

/// More than sockets and their buffers hold, both ways at once.
#[test]
fn large_parts_do_not_stop_half_way() {
    on_all(3, |comm| {
        let part = |from: usize, to: usize| vec![(16 * from + to) as u8; 5_000_000 + to];
        let parts = (0..3).map(|to| part(comm.rank(), to)).collect();
        let got = comm.exchange(parts)?;
        assert!((0..3).all(|from| got[from] == part(from, comm.rank())));
        Ok(())
    });
}

#[test]
fn a_rank_remembers_its_last_thousand_transfers() {
    on_all(2, |comm| {
        for _ in 0..1001 {
            comm.all_gather(&[0; 3])?;
        }
        comm.subgroup(&[comm.rank()])?.broadcast(0, &[1])?;
        let history = comm.history();
        assert_eq!(history.len(), 1000);
        assert_eq!(history[0].number, 3);
        let [.., gather, broadcast] = &history[..] else { panic!("there are a thousand") };
        assert_eq!(
            (gather.kind, gather.bytes, &gather.members[..]),
            (Kind::AllGather, 3, &[0, 1][..])
        );
        assert_eq!((broadcast.kind, broadcast.bytes), (Kind::Broadcast, 0));
        assert_eq!(broadcast.members, [comm.rank()]);
        assert!(history.iter().all(|t| t.ended.is_some_and(|ended| ended >= t.began)));
        Ok(())
    });
}

/// Runs `body`, which goes wrong on some ranks, on ranks of every kind: what all are told `says` so,
/// well before the deadline unless `deadline` is short.
fn fails(deadline: Duration, body: impl Fn(&Rank) -> Result<(), ShardError> + Sync, says: &[&str]) {
    let runs: [&dyn Fn() -> Result<Vec<()>, ShardError>; 2] =
        [&|| run_threads(4, deadline, &body), &|| run_tcp(4, deadline, &body)];
    for run in runs {
        let began = Instant::now();
        let error = run().expect_err("it cannot go on").to_string();
        assert!(began.elapsed() < Duration::from_secs(15), "nobody waits for {SOON:?}");
        for part in says {
            assert!(error.contains(part), "{error}");
        }
    }
}

#[test]
fn ranks_that_do_different_things_are_told_who_does_what() {
    fails(
        SOON,
        |comm| match comm.rank() {
            2 => comm.broadcast(0, &[]).map(drop),
            _ => comm.all_gather(&[]).map(drop),
        },
        &["broadcast as collective 1", "all-gather as collective 1"],
    );
    fails(
        SOON,
        |comm| {
            let mut values = vec![0.0; 3 + comm.rank() / 3];
            comm.all_reduce(&mut values)
        },
        &["all-reduce: rank"],
    );
    fails(
        SOON,
        |comm| agree(comm, &[("seed", 1), ("mask", comm.rank() as u64 / 2)]),
        &["ranks [2, 3] have another mask than rank 0"],
    );
    fails(
        SOON,
        |comm| {
            let all = [Message { peer: 1, bytes: vec![0; 3] }];
            match comm.rank() {
                0 => comm.send_receive(all.to_vec(), &[]).map(drop),
                1 => comm.send_receive(vec![], &[Expected { peer: 0, bytes: 4 }]).map(drop),
                _ => Ok(()),
            }
        },
        &["rank 0 sent 3 bytes to rank 1, which expects 4"],
    );
}

#[test]
fn a_rank_that_leaves_fails_panics_aborts_or_hangs_ends_all() {
    fails(
        SOON,
        |comm| if comm.rank() == 3 { Ok(()) } else { comm.all_gather(&[]).map(drop) },
        &["rank 3", "has ended"],
    );
    fails(
        SOON,
        |comm| match comm.rank() {
            1 => Err(ShardError::new("no memory")),
            _ => comm.all_gather(&[]).map(drop),
        },
        &["rank 1: no memory"],
    );
    fails(
        SOON,
        |comm| match comm.rank() {
            1 => panic!("an invariant broke"),
            _ => comm.all_gather(&[]).map(drop),
        },
        &["rank 1: it panicked: an invariant broke"],
    );
    fails(
        SOON,
        |comm| {
            if comm.rank() == 2 {
                comm.abort("the loss is not finite");
            }
            comm.all_gather(&[]).map(drop)
        },
        &["rank 2: the loss is not finite"],
    );
    fails(
        Duration::from_millis(200),
        |comm| {
            if comm.rank() == 0 {
                std::thread::sleep(Duration::from_millis(800));
            }
            comm.all_gather(&[]).map(drop)
        },
        &["waited 200ms for rank 0 in all-gather"],
    );
}
