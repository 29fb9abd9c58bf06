//! Ranks that are threads and ranks over TCP: every collective against what it should give, and every
//! way to wait for ever. `tcp.rs` has what only processes can do to each other.

mod processes;

use std::time::{Duration, Instant};

use foveate::tensor::random::Random;
use foveate_shard::collectives::log::{TransferLog, compare, is_log};
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

/// More values than go whole: every rank sums a part of them.
#[test]
fn many_values_are_summed_in_order_of_rank_too() {
    for (ranks, len) in [(2, 4096), (3, 10_007), (5, 4099), (8, 70_001)] {
        let mut sums = vec![0.0f32; len];
        for rank in 0..ranks {
            sums.iter_mut().zip(values(rank, len)).for_each(|(sum, v)| *sum += v);
        }
        on_all(ranks, |comm| {
            let mut summed = values(comm.rank(), len);
            comm.all_reduce(&mut summed)?;
            assert!(summed.iter().zip(&sums).all(|(a, b)| a.to_bits() == b.to_bits()));
            let sent: usize = comm.history().iter().map(|t| t.bytes).sum();
            let least = 2 * 4 * len * (ranks - 1) / ranks;
            assert!(sent < least + 16 * ranks, "{sent} bytes where {least} have to be sent");
            Ok(())
        });
    }
    fails(
        SOON,
        |comm| comm.all_reduce(&mut vec![0.0; 5000 + comm.rank() / 3]),
        &["all-reduce: rank", "5001"],
    );
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
        assert_eq!((gather.place, broadcast.place, gather.plan), (1001, 1, 0));
        assert_ne!(gather.group, broadcast.group);
        agree(comm, &[("seed", 3)])?;
        comm.all_gather(&[])?;
        let last = comm.history().pop().unwrap();
        assert_ne!(last.plan, 0, "transfers are of what was agreed on");
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

/// Ranks 0 and 1 wait for each other's row, rank 1 for rank 3, and rank 3 for nobody.
#[test]
fn a_deadline_names_the_rank_that_waits_for_none() {
    let deadline = Duration::from_secs(2);
    let body = |world: &Rank| {
        let rank = world.rank();
        let column = world.subgroup(&[rank % 2, rank % 2 + 2])?;
        let row = world.subgroup(&[rank / 2 * 2, rank / 2 * 2 + 1])?;
        if rank == 3 {
            std::thread::sleep(2 * deadline);
        }
        if rank == 0 {
            // The others wait a little longer than this one.
            row.all_gather(&[])?;
        }
        std::thread::sleep(Duration::from_millis(50));
        column.all_gather(&[])?;
        row.all_gather(&[]).map(drop)
    };
    fails(
        deadline,
        body,
        &[
            "rank 0 waited 2s for rank 1 in all-gather",
            "rank 1 waits for rank 3 in all-gather",
            "rank 3 waits for no rank: it computes",
        ],
    );
}

/// The logs of four ranks of a run that fails.
fn logs(body: impl Fn(&Rank) -> Result<(), ShardError> + Sync) -> Vec<TransferLog> {
    let dir = tempfile::tempdir().unwrap();
    let run = |rank: &Rank| {
        let result = body(rank);
        if let Err(e) = &result {
            TransferLog::of(rank, &e.to_string()).write(dir.path()).unwrap();
        }
        result
    };
    run_threads(4, Duration::from_millis(300), run).unwrap_err();
    let mut files: Vec<_> =
        std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(files.iter().all(|file| is_log(file)));
    files.iter().map(|file| TransferLog::read(file).unwrap()).collect()
}

#[test]
fn a_file_that_has_the_name_of_a_log_and_is_none_stays() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("rank-00000.jsonl");
    let of_rank =
        || run_threads(1, Duration::from_secs(1), |rank| Ok(TransferLog::of(rank, "end")));
    let log = of_rank().unwrap().remove(0);
    for text in ["{\"rank\": 0}\n", "my notes\n", "\n"] {
        std::fs::write(&file, text).unwrap();
        assert!(!is_log(&file), "{text}");
        let told = log.write(dir.path()).unwrap_err().to_string();
        assert!(told.ends_with("rank-00000.jsonl is no log of transfers, and stays"), "{told}");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), text);
    }
    // Its rank was killed before it had written a line.
    std::fs::write(&file, "").unwrap();
    assert!(is_log(&file) && log.write(dir.path()).is_ok() && is_log(&file));
    let folder = dir.path().join("rank-00001.jsonl");
    std::fs::create_dir(&folder).unwrap();
    assert!(!is_log(&folder) && !is_log(&dir.path().join("rank-00002.jsonl")));
}

#[test]
fn logs_say_which_rank_did_what_others_did_not() {
    let hangs = |world: &Rank| {
        agree(world, &[("seed", 1)])?;
        let pair = world.subgroup(&[world.rank() / 2 * 2, world.rank() / 2 * 2 + 1])?;
        if world.rank() == 2 {
            std::thread::sleep(Duration::from_secs(1));
        }
        pair.all_reduce(&mut [1.0; 16])?;
        world.all_gather(&[0; 10]).map(drop)
    };
    let all = logs(hangs);
    assert_eq!(all.len(), 4);
    let found = compare(all.clone(), &[]).unwrap();
    assert_eq!(found.findings[0].ranks, [2], "{found}");
    let said = &found.findings[0].message;
    assert!(
        said.starts_with("rank 2 did not begin all-re") || said.contains("all-gather"),
        "{said}"
    );
    assert!(said.contains("its last was all-gather of"), "{said}");
    assert_eq!(found.findings.len(), 1, "{found}");
    // A rank that was killed writes none.
    let killed: Vec<_> = all.iter().filter(|log| log.header.rank != 2).cloned().collect();
    let found = compare(killed.clone(), &[]).unwrap();
    assert_eq!((&found.silent[..], &found.findings[0].ranks[..]), (&[2][..], &[2][..]));
    assert!(found.findings[0].message.contains("it left no log: it was killed"), "{found}");
    // One whose log is damaged wrote one, and so did rank 9 of another run.
    let found = compare(killed.clone(), &[2, 9]).unwrap();
    assert_eq!((&found.silent[..], &found.unread[..]), (&[2][..], &[2][..]));
    assert!(found.findings[0].message.contains("; its log could not be read"), "{found}");
    assert!(!found.to_string().contains("left no log"), "{found}");
    // The log of an earlier attempt is not taken for one of this.
    let mut older = all[2].clone();
    older.header.meeting ^= 1;
    let found = compare([&killed[..], &[older]].concat(), &[]).unwrap();
    assert_eq!((&found.earlier[..], &found.silent[..]), (&[2][..], &[2][..]));

    let differs = |world: &Rank| match world.rank() {
        1 => world.broadcast(0, &[]).map(drop),
        _ => world.all_gather(&[]).map(drop),
    };
    let found = compare(logs(differs), &[]).unwrap();
    assert_eq!(found.findings[0].ranks, [1], "{found}");
    let said = &found.findings[0].message;
    assert!(
        said.contains("rank 1 does broadcast, ranks 0, 2, 3 all-gather, as exchange 1"),
        "{said}"
    );

    assert!(compare(vec![], &[]).is_err());
    assert!(compare([&all[..1], &all[..1]].concat(), &[]).is_err());
    let dir = tempfile::tempdir().unwrap();
    let first = serde_json::to_string(&all[0].header).unwrap();
    let behind = |line: &[u8]| [first.as_bytes(), b"\n", line].concat();
    let of = |rank: &str, ranks: &str| {
        let counts =
            format!(r#"{{"rank":{rank},"ranks":{ranks},"meeting":1,"seconds":1.0,"why":"x"}}"#);
        counts.into_bytes()
    };
    for (text, says) in [
        (Vec::new(), ": it is empty"),
        (b"{\"rank\": 1}\n".to_vec(), ":1:11: missing field"),
        (of("9", "2"), ":1: rank 9 of 2; that is no line of a transfer log"),
        // As many as this are no ranks, and a list of those without a log takes all memory.
        (of("0", "99999999999"), ":1: rank 0 of 99999999999; that is no line"),
        (behind(b"{\"number\": 3\n"), ":2:12: EOF while parsing an object; that is no line"),
        (behind(b"\xff\xfe"), ":2:1: expected value; that is no line of a transfer log"),
        (behind(b"{\"kind\": \"\xff\"}\n"), ":2:"),
    ] {
        let file = dir.path().join("rank-00000.jsonl");
        std::fs::write(&file, text).unwrap();
        let error = TransferLog::read(&file).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
    let endless = dir.path().join("rank-00001.jsonl");
    std::fs::File::create(&endless).unwrap().set_len(1 << 40).unwrap();
    let error = TransferLog::read(&endless).unwrap_err().to_string();
    assert!(error.contains(": it has 1099511627776 bytes, and a transfer log at most"), "{error}");
}

#[test]
fn what_a_restart_may_mend_is_told_from_what_it_may_not() {
    let late = run_threads(2, Duration::from_millis(100), |comm| {
        if comm.rank() == 0 {
            std::thread::sleep(Duration::from_millis(400));
        }
        comm.all_gather(&[]).map(drop)
    });
    assert!(late.unwrap_err().is_lost());
    let wrong = run_tcp(2, SOON, |comm| agree(comm, &[("seed", comm.rank() as u64)]));
    assert!(!wrong.unwrap_err().is_lost());
}

/// By how late each rank fails: all at once, or while it hears of another.
#[test]
fn of_ranks_that_fail_alike_one_says_it() {
    let mut random = Random::new(41);
    for round in 0..12 {
        let late: Vec<u64> = (0..4).map(|_| random.below([1, 3, 40][round % 3]) as u64).collect();
        let said = run_tcp(4, SOON, |rank| {
            // Another rank may have failed already when this one has met all.
            if let Err(e) = rank.all_gather(&[]) {
                return Ok(e.to_string().strip_prefix("aborted: ").map(str::to_owned));
            }
            std::thread::sleep(Duration::from_millis(late[rank.rank()]));
            let own = rank.abort("there is no bias");
            // No rank ends before all have said what they do.
            std::thread::sleep(Duration::from_millis(60));
            Ok(own)
        });
        let said = said.unwrap();
        let own = said.iter().filter(|said| said.is_none()).count();
        assert_eq!(own, 1, "{late:?}: {said:?}");
        let first = said.iter().position(Option::is_none).unwrap();
        let of = format!("rank {first}: there is no bias");
        assert!(said.iter().flatten().any(|said| *said == of), "{late:?}: {said:?}");
    }
}
